"""Earlier policies of a run as opponents, with the weights of a very small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllm.config.schema import TrainConfig
from rllm.environments.textarena import PastPolicies
from rllm.errors import ConfigError
from rllm.store import open_store
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.opponents import check_opponents
from rllm.types import Episode, Step, Trajectory

from . import mortal_run
from .conftest import ask_for

PAST = {"every": 1, "keep": 2}
ROLES = ("policy", "opponent", "opponent/start")


@pytest.fixture(scope="module")
def model(policies: Path) -> Path:
    return mortal_run.policy(policies)


def duel(question: str, past_policies: object, base_url: str) -> Episode:
    """Let the policy and two earlier ones answer; the longest answer wins."""
    answers = {role: ask_for(base_url, question, model=role, max_tokens=8, temperature=1.0) for role in ROLES}
    longest = max(len(answer["choices"][0]["message"]["content"]) for answer in answers.values())
    won = len(answers["policy"]["choices"][0]["message"]["content"]) == longest
    steps = [Step(id=answers["policy"]["id"])]
    return Episode(trajectories=[Trajectory(name="player_0", steps=steps, reward=float(won), info={"game": "length"})])


def trainer_of(run_dir: Path, model: Path, num_steps: int, **options: Any) -> AgentTrainer:
    return AgentTrainer(
        agent_run_func=duel,
        train_dataset=[{**question, "past_policies": PAST} for question in mortal_run.QUESTIONS[:2]],
        config={
            "model": {"path": str(model)},
            "run_dir": str(run_dir),
            "num_steps": num_steps,
            "tasks_per_step": 2,
            "save_every": 2,
            "algorithm": {"name": "rae"},
            "rollout": {"group_size": 2},
            "optim": {"lr": 1e-2},
            "trackers": ["jsonl"],
        },
        **options,
    )


def answers_of(run_dir: Path) -> list[tuple[str, int, str, int, tuple[int, ...]]]:
    """Return task, attempt, model, weight version and tokens of every call."""
    with open_store(str(run_dir / "traces.db"), read_only=True) as store:
        return sorted(
            (
                info.metadata["task_id"],
                info.metadata["index"],
                trace.model,
                trace.weight_version or 0,
                tuple(trace.response_ids),
            )
            for info in store.sessions(limit=100)
            for trace in store.by_session(info.id)
        )


@pytest.mark.slow
def test_opponents_are_sampled_from_snapshots_and_reproduced_after_resuming(model: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trainer_of(whole, model, 4).train()
    trainer_of(resumed, model, 3).train()
    trainer_of(resumed, model, 4, resume=True).train()
    assert answers_of(resumed) == answers_of(whole)
    versions: dict[str, dict[int, set[int]]] = {role: {} for role in ROLES}
    for task_id, _, role, version, _ in answers_of(whole):
        step = int(task_id.partition("@")[2].partition(".")[0])
        versions[role].setdefault(step, set()).add(version)
    assert versions["policy"] == {step: {step} for step in range(4)}
    assert versions["opponent/start"] == {step: {0} for step in range(4)}
    assert all(seen <= {step - 1, step} for step, seen in versions["opponent"].items() if step)
    assert len(set.union(*versions["opponent"].values())) > 2, "the pool follows the policy"
    weights = Path("checkpoints/step-000004/model.safetensors")
    assert (whole / weights).read_bytes() == (resumed / weights).read_bytes()


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"backend": "verl"}, "backend"), ({"model": {"lora_rank": 4}}, "model.lora_rank")],
)
def test_runs_without_support_for_opponents_are_rejected(
    settings: dict[str, Any], name: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=name):
        check_opponents(TrainConfig.model_validate(settings), PastPolicies(every=1))
