"""Reward functions of a run: deadlines, groups, and weights of named parts."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rllm.agents.chat_agent import MathAgent
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.errors import ConfigError, RolloutError
from rllm.rewards import judge
from rllm.rewards.scoring import group_reward, with_reward
from rllm.store import open_store
from rllm.testing import ScriptedEngine, ScriptedServer
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import OUTCOME_KEY, Trajectory

from .conftest import BACKEND, TASKS, RunTrainer, ask


def answering(word: str, base_url: str) -> Any:
    """Return the word, as the scripted model does."""
    return ask(base_url, word)


def test_reward_function_has_a_deadline(run_trainer: RunTrainer) -> None:
    async def never(task: dict[str, str], answer: str) -> None:
        await asyncio.Event().wait()

    run = run_trainer({"reward": {"timeout_s": 0.01}}, agent=answering, reward=never, raises=RolloutError)
    assert "never did not finish within 0.01 s: raise reward.timeout_s" in str(run.error)


def test_groups_are_scored_before_training(run_trainer: RunTrainer) -> None:
    groups = []

    @group_reward
    async def ordered(task: dict[str, str], answers: list[str], trajectories: list[Trajectory]) -> list[float]:
        assert [path.steps[-1].model_response for path in trajectories] == answers == [task["word"]] * len(answers)
        groups.append(len(answers))
        return [float(place) for place in range(len(answers))]

    run = run_trainer({"eval": {"num_rollouts": 2}}, agent=answering, val=True, reward=ordered)
    assert sorted(groups) == [2] * 4 + [3] * 4, "two evaluations and two steps, of two tasks each"
    assert [line["rollout/reward"] for line in run.lines if "rollout/reward" in line] == [1.0, 1.0]
    assert [line["eval/reward"] for line in run.lines if "eval/reward" in line] == [0.5, 0.5]
    assert all(batch.advantages.unique().numel() == 2 for batch in run.backend.batches), (
        "the advantages are 1.22 and -1.22"
    )


def test_group_with_a_failing_reward_is_dropped_and_counted(run_trainer: RunTrainer) -> None:
    @group_reward
    def broken(task: dict[str, str], answers: list[str]) -> list[float]:
        if task["word"] == "fig":
            raise ValueError("figs have no order")
        return [0.0, 0.5, 1.0]

    run = run_trainer({"tasks_per_step": 4, "num_steps": 1}, agent=answering, reward=broken)
    assert (run.lines[-1]["rollout/num_failed"], run.lines[-1]["dropped/error"]) == (3, 3)
    assert run.lines[-1]["rollout/reward"] == 0.5


def test_reward_parts_have_metrics_and_weights(run_trainer: RunTrainer) -> None:
    def both(task: dict[str, str], answer: str) -> dict[str, float]:
        return {"right": 1.0, "length": len(answer)}

    config = {"tasks_per_step": 4, "num_steps": 1, "reward": {"weights": {"length": 0.5}}}
    run = run_trainer(config, agent=answering, reward=both)
    assert [run.lines[-1][f"rollout/part/{name}"] for name in ("right", "length")] == [1.0, 4.5]
    assert run.lines[-1]["rollout/reward"] == 1 + 0.5 * 4.5
    assert run.lines[-1]["rollout/accuracy"] == 1.0


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        (answering, {"config": {"reward": {"timeout_s": 1.0}}}, r"reward\.timeout_s=1\.0 would have no effect"),
        (answering, {"reward": lambda answer: 1.0}, "must take a task and an answer"),
        (answering, {"reward": 1.0}, r"reward=1\.0: use a function"),
        (with_reward(answering, lambda task, answer: 1.0), {"reward": print}, "has a reward function already"),
    ],
)
def test_unusable_reward_is_rejected(agent: Any, options: dict[str, Any], message: str) -> None:
    config = {"backend": BACKEND, "model": {"path": "scripted"}, **options.pop("config", {})}
    with pytest.raises(ConfigError, match=message):
        AgentTrainer(agent_run_func=agent, train_dataset=TASKS, config=config, **options)


def test_environment_may_use_a_judge(tmp_path: Path) -> None:
    with ScriptedServer(ScriptedEngine(['{"reasoning": "so", "scores": {"right": 8}}', "nonsense"])) as server:
        rubric = {"model": "m", "base_url": server.base_url, "num_retries": 0}
        scored = judge({**rubric, "criteria": [{"name": "right", "description": "right"}]})
        trainer = AgentTrainer(
            agent_class=MathAgent,
            env_class=SingleTurnEnvironment,
            env_args={"reward_fn": scored},
            train_dataset=[{"question": "fig"}, {"question": "kiwi"}],
            config={
                "run_dir": str(tmp_path / "run"),
                "backend": BACKEND,
                "model": {"path": "scripted"},
                "trackers": ["jsonl"],
                "num_steps": 1,
                "tasks_per_step": 2,
                "rollout": {"group_size": 1, "max_concurrent": 1},
                "algorithm": {"name": "reinforce"},
            },
        )
        trainer.train()
    [line] = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (line["rollout/part/right"], line["judge/failed"], line["rollout/num_unscored"]) == (0.8, 0.5, 1.0)
    assert len((tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()) == 1
    with closing(open_store(str(tmp_path / "run" / "traces.db"), read_only=True)) as store:
        paths = [session.metadata[OUTCOME_KEY]["trajectories"][0] for session in store.sessions(limit=9)]
    assert sorted(path["verdict"].get("reasoning", "") for path in paths) == ["", "so"]
    assert sum("the judge gave no verdict" in path["verdict"].get("error", "") for path in paths) == 1


def test_environment_scores_itself() -> None:
    with pytest.raises(ConfigError, match="env_args"):
        AgentTrainer(
            agent_class=MathAgent,
            env_class=SingleTurnEnvironment,
            env_args={"reward_fn": print},
            reward=lambda task, answer: 1.0,
            train_dataset=[{"question": "?"}],
            config={"backend": BACKEND, "model": {"path": "scripted"}},
        )
