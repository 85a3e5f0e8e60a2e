"""Episodes of a run can be rebuilt from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rllm.errors import ConfigError, StoreError
from rllm.store import open_store
from rllm.tracking.about import run_id_of
from rllm.trainer.episode_records import stored_episodes
from rllm.trainer.sampled_rows import rows_of_store
from rllm.types import OUTCOME_KEY
from rllm.viewer.explain import explain, latest_episodes

from .conftest import RunTrainer


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no traces.db"):
        list(stored_episodes(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"has no traces.db"):
        list(stored_episodes(tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        list(stored_episodes(tmp_path / "none"))


@pytest.mark.parametrize(
    "outcome",
    [
        "over",
        {"ended": "somehow"},
        {"error": "it broke"},
        {"metrics": 3},
        {"trajectories": [{"reward": 1.0}]},
        {"trajectories": ["agent"]},
        {"trajectories": [{"name": "agent", "steps": [{"reward": 1.0}]}]},
    ],
)
def test_outcome_in_another_format_is_reported_with_its_session(tmp_path: Path, outcome: object) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("odd", {"split": "train", "task_id": "a", OUTCOME_KEY: outcome}).result()
        (listed,) = latest_episodes(store, limit=5)
    assert listed.episode_id == "a:0"
    with pytest.raises(StoreError, match=r"session 'odd': .*rllm traces delete odd --store "):
        list(stored_episodes(tmp_path))


def test_runs_that_share_a_store_have_their_own_episodes(run_trainer: RunTrainer, tmp_path: Path) -> None:
    shared = {"num_steps": 1, "store": str(tmp_path / "shared.db"), "rollout": {"group_size": 2}}
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        run_trainer({**shared, "run_dir": str(folder)})
    with open_store(str(shared["store"]), read_only=True) as store:
        everything = {session.id for session in store.sessions()}
        for folder in folders:
            own = {episode.session_id for episode in stored_episodes(folder)}
            run_id = run_id_of(folder)
            listed = latest_episodes(store, limit=100, run_id=run_id)
            assert {item.session_id for item in listed} == own
            assert explain(store, listed[0].episode_id, run_id=run_id).session_id in own
            assert len(own) == len(rows_of_store(store, run_id)) == 4
            everything -= own
    assert everything == set()
