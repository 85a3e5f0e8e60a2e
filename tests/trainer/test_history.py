"""What a run keeps is enough to put its episodes together again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rllm.errors import ConfigError, StoreError
from rllm.store import open_store
from rllm.trainer.explain import latest_episodes
from rllm.trainer.history import stored_episodes
from rllm.types import OUTCOME_KEY


def test_what_is_no_folder_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no traces.db, so it is the folder of no run"):
        list(stored_episodes(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"has no traces.db"):
        list(stored_episodes(tmp_path))
    with pytest.raises(ConfigError, match="there is no such folder"):
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
def test_an_outcome_of_another_form_is_named_with_its_session(tmp_path: Path, outcome: object) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("odd", {"split": "train", "task_id": "a", OUTCOME_KEY: outcome}).result()
        (listed,) = latest_episodes(store, limit=5)
    assert listed.episode_id == "a:0"
    with pytest.raises(
        StoreError, match=r"session 'odd': .* of another form than ours .*rllm traces delete odd --store "
    ):
        list(stored_episodes(tmp_path))
