"""Replay: groups of recent steps in later batches, and the same ones after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rllm.algorithms.batch import Batch
from rllm.config.loading import load_config
from rllm.config.sizes import num_replayed
from rllm.errors import ConfigError
from rllm.trainer.selection import ReplayBuffer
from rllm.types import Episode, StepCredit, TerminationReason, Trajectory

from .conftest import Run, RunTrainer

REPLAY = {
    "rollout": {"group_size": 2, "max_concurrent": 1},
    "data": {"replay": 0.5, "replay_steps": 2},
    "tasks_per_step": 2,
}


def numbers_of(batch: Batch) -> list[Any]:
    assert batch.sampler_logprobs is not None
    return [[sequence.ids for sequence in batch.sequences], batch.advantages.tolist(), batch.sampler_logprobs.tolist()]


def test_batch_contains_a_share_of_earlier_groups(run_trainer: RunTrainer) -> None:
    run = run_trainer({**REPLAY, "num_steps": 3})
    assert [line["batch/replayed"] for line in run.lines] == [0.0, 0.5, 0.5]
    assert [len(batch) for batch in run.backend.batches] == [4, 8, 8]
    assert [line["tokens/staleness_max"] for line in run.lines][:2] == [0.0, 1.0]
    assert len(run.words) == 3 * 2 * 2, "replayed groups are not sampled again"
    assert run.backend.algorithms[0].correction == "truncate"


def test_resumed_run_replays_the_same_groups(run_trainer: RunTrainer, tmp_path: Path) -> None:
    def batches(run: Run) -> list[Any]:
        return [numbers_of(batch) for batch in run.backend.batches]

    whole = batches(run_trainer({**REPLAY, "num_steps": 4, "run_dir": str(tmp_path / "whole")}))
    parts = {**REPLAY, "run_dir": str(tmp_path / "parts")}
    first = batches(run_trainer({**parts, "num_steps": 2}))
    assert first + batches(run_trainer({**parts, "num_steps": 4}, resume=True)) == whole


def group(step: int, place: int, *, failed: bool = False) -> list[Episode]:
    return [
        Episode(
            task_id=f"{place}@{step}.0.{place}",
            session_id=f"{step}-{place}-{index}",
            termination_reason=TerminationReason.ERROR if failed and index else None,
            info={"error": {}} if failed and index else {},
            trajectories=[Trajectory(reward=float(index))],
        )
        for index in range(2)
    ]


def credits_of(episodes: list[Episode], dropped: str | None = None) -> list[StepCredit]:
    return [
        StepCredit(
            trace_id="t",
            session_id=item.session_id,
            training_step=0,
            episode_id=item.id,
            trajectory_name="agent",
            reward=1.0,
            dropped=dropped,
        )
        for item in episodes
    ]


def test_groups_are_replayed_while_they_are_recent() -> None:
    buffer = ReplayBuffer(load_config(["tasks_per_step=2", "data.replay=0.5", "data.replay_steps=2"]))
    seen: Counter[int] = Counter()
    for step in range(6):
        chosen = buffer.sample(step)
        assert chosen == buffer.sample(step), "a function of seed and step"
        ages = [step - int(episode.session_id.partition("-")[0]) for episode in chosen]
        assert len(ages) == (0 if step == 0 else 2 * 2)
        seen.update(ages)
        episodes = [*group(step, 0), *group(step, 1)]
        buffer.add(step, episodes, credits_of(episodes))
    assert set(seen) == {1, 2}


def test_only_groups_with_advantages_are_replayed() -> None:
    buffer = ReplayBuffer(load_config(["tasks_per_step=2", "data.replay=0.5"]))
    good, uniform, half_failed = group(0, 0), group(0, 1), group(0, 2, failed=True)
    learned = [*credits_of(good), *credits_of(uniform, "zero_variance"), *credits_of(half_failed[:1])]
    buffer.add(0, [*good, *uniform, *half_failed], learned)
    assert buffer.sessions == {"0": [["0-0-0", "0-0-1"], ["0-2-0"]]}


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.25, 4), (0.5, 12), (0.9, 108)])
def test_number_of_replayed_groups_follows_from_the_share(share: float, number: int) -> None:
    assert num_replayed(load_config(["tasks_per_step=12", f"data.replay={share}"])) == number


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": {"replay": 0.01}}, r"data\.replay=0\.01"),
        ({"data": {"replay_steps": 3}}, r"data\.replay_steps=3"),
        ({"data": {"replay": 0.5}, "algorithm": {"name": "remax"}}, r"data\.replay=0\.5"),
    ],
)
def test_ineffective_replay_settings_are_rejected(
    run_trainer: RunTrainer, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        run_trainer(settings)
