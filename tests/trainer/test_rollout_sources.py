"""The three sources of `AgentTrainer`, on the scripted backend: one loop, the same record."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.agents.chat_agent import MathAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError, RolloutError
from rllm.sdk import get_chat_client_async
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import Episode
from rllm.workflows import MultiTurnWorkflow, SimpleWorkflow
from rllm.workflows.workflow import Workflow

from .conftest import BACKEND, TASKS, ScriptedBackend

CONFIG: dict[str, Any] = {
    "num_steps": 1,
    "tasks_per_step": 2,
    "backend": BACKEND,
    "trackers": ["jsonl"],
    "model": {"path": "scripted"},
    "rollout": {"group_size": 4, "max_tokens": 64},
}
ONCE: dict[str, Any] = {"rollout": {**CONFIG["rollout"], "num_retries": 0}}
"""Failed rollouts are not retried, a second later."""


def every_other(index: int) -> float:
    """Return rewards that differ within every group, in any order of rollouts."""
    return float(index % 2)


class Drawn(GridWorldEnv):
    """Has its own format of rows."""

    @classmethod
    def from_dict(cls, info: Mapping[str, Any]) -> Drawn:
        return cls(size=len(info["map"]))


class Echo(BaseAgent):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.path, self.messages = Trajectory(name="echo"), []

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    @property
    def trajectory(self) -> Trajectory:
        return self.path

    def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
        self.messages = [*self.messages, {"role": "user", "content": observation}]

    def update_from_model(self, response: str) -> Action:
        self.messages = [*self.messages, {"role": "assistant", "content": response}]
        self.path.steps.append(Step(action=response))
        return Action(response)


class TwoTurns(BaseEnv):
    def __init__(self, word: str) -> None:
        self.word, self.turn = word, 0

    def reset(self) -> tuple[str, dict[str, Any]]:
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return f"again {action}", every_other(self.idx) if self.turn == 2 else 0.0, self.turn == 2, {}

    @staticmethod
    def from_dict(info: Any) -> TwoTurns:
        return TwoTurns(info["word"])


class SolverJudge(Workflow):
    """A solver that is called by the engine, and a judge that is called through the gateway."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        messages = [{"role": "user", "content": task["word"]}]
        answer = await self.rollout_engine.get_model_response(messages)
        step = Step.from_model_output(answer, messages)
        self.commit("solver", trajectory=Trajectory(steps=[step], reward=every_other(int(uid[-1]))))
        async with get_chat_client_async() as client:
            judged = await client.chat.completions.create(
                model="judge", messages=[{"role": "user", "content": f"judge {answer.text}"}]
            )
        self.commit("judge", trajectory=Trajectory(steps=[Step(id=judged.id)], reward=every_other(int(uid[-1]))))


class ReturnsItself(SolverJudge):
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:  # type: ignore[override]
        await super().run(task, uid)
        return self.collect_trajectories()


class Passing(SolverJudge):
    def __init__(self, rollout_engine: Any, executor: Any, num_tries: int = 1, **kwargs: Any) -> None:
        super().__init__(rollout_engine, executor, **kwargs)
        self.num_tries = num_tries


class NeedsItsEngine(SolverJudge):
    def __init__(self, rollout_engine: Any, **kwargs: Any) -> None:
        self.ask, self.num_tries = rollout_engine.get_model_response, kwargs.pop("num_tries")
        super().__init__(rollout_engine, **kwargs)


class PassingAgent(Echo):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def metrics(run_dir: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {key: value for line in lines for key, value in line.items()}


def trained(tmp_path: Path, settings: dict[str, Any] | None = None, **source: Any) -> ScriptedBackend:
    config = {**CONFIG, "run_dir": str(tmp_path / "run"), **(settings or {})}
    AgentTrainer(train_dataset=TASKS, config=config, **source).train()
    return ScriptedBackend.latest


def test_agent_in_an_environment_is_trained(tmp_path: Path) -> None:
    backend = trained(tmp_path, agent_class=Echo, env_class=TwoTurns)
    (batch,) = backend.batches
    outputs = backend.inference.outputs
    assert len(outputs) == 2 * 4 * 2
    assert len(batch) == 8  # the second turn continues the first: one sequence for both
    sampled = {tuple(output.completion_ids) for output in outputs}
    for sequence in batch.sequences:
        assert {tuple(sequence.ids[span.start : span.stop]) for span in sequence.spans} <= sampled
    found = metrics(tmp_path / "run")
    assert found["rollout/calls_per_episode"] == 2
    assert found["rollout/num_failed"] == 0


def test_environments_of_all_rollouts_step_concurrently(tmp_path: Path) -> None:
    together = threading.Barrier(80)

    class Together(TwoTurns):
        def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
            together.wait(60)
            return super().step(action)

        @staticmethod
        def from_dict(info: Any) -> TwoTurns:
            return Together(info["word"])

    rollout = {"group_size": 40, "max_tokens": 64, "max_concurrent": 80, "timeout_s": 2400, "num_retries": 0}
    trained(tmp_path, {"rollout": rollout}, agent_class=Echo, env_class=Together)
    assert metrics(tmp_path / "run")["rollout/num_failed"] == 0


def test_every_call_is_stored_with_its_imposed_sampling(tmp_path: Path) -> None:
    trained(tmp_path, agent_class=Echo, env_class=TwoTurns)
    store = open_store(str(tmp_path / "run" / "traces.db"), read_only=True)
    sessions = store.sessions()
    assert len(sessions) == 8
    for session in sessions:
        first, second = store.by_session(session.id)
        assert second.parent_id == first.id
        assert first.sampling["max_tokens"] == 64
        assert first.sampling["temperature"] == 1.0
        assert [credit.trace_id for credit in store.credits(session.id)] == [first.id, second.id]
    store.close()


@pytest.mark.parametrize("workflow", [SolverJudge, ReturnsItself])
def test_workflow_with_two_roles_has_a_group_for_each(tmp_path: Path, workflow: type[Workflow]) -> None:
    trained(tmp_path, workflow_class=workflow)
    store = open_store(str(tmp_path / "run" / "traces.db"), read_only=True)
    found = [credit for session in store.sessions() for credit in store.credits(session.id)]
    assert len(found) == 2 * 4 * 2
    for credit in found:
        assert credit.group_id is not None
        assert credit.group_id.endswith(f"/{credit.trajectory_name}")
    assert {credit.trajectory_name for credit in found} == {"solver", "judge"}
    store.close()


def test_workflow_that_is_not_thread_safe_runs_one_rollout_at_a_time(tmp_path: Path) -> None:
    class Alone(SolverJudge):
        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    backend = trained(tmp_path, workflow_class=Alone)
    assert len(backend.inference.outputs) == 2 * 4 * 2
    assert backend.inference.most_live == 1


def test_workflow_is_retried_after_an_exception(tmp_path: Path) -> None:
    class Unsteady(SolverJudge):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            tried.append(uid)
            if tried.count(uid) == 1:
                raise RuntimeError("not yet")
            await super().run(task, uid)

    tried: list[str] = []
    trained(tmp_path, workflow_class=Unsteady)
    assert len(tried) == 2 * 8
    assert metrics(tmp_path / "run")["rollout/num_failed"] == 0


def test_failed_rollouts_are_left_out_of_the_baseline(tmp_path: Path) -> None:
    class FailingStep(TwoTurns):
        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            self.turn += 1
            if self.turn == 2 and self.idx == 0:
                raise RuntimeError("fell")
            if self.turn == 2 and self.idx == 1:
                raise SystemExit(1)
            return "again", float(self.idx % 2), self.turn == 2, {}

        @staticmethod
        def from_dict(info: Any) -> TwoTurns:
            return FailingStep(info["word"])

    backend = trained(tmp_path, agent_class=Echo, env_class=FailingStep)
    (batch,) = backend.batches
    assert len(backend.inference.outputs) == 2 * 4 * 2
    assert len(batch) == 2 * 2
    store = open_store(str(tmp_path / "run" / "traces.db"), read_only=True)
    found = [credit for session in store.sessions() for credit in store.credits(session.id)]
    assert {(credit.reward, credit.baseline) for credit in found if not credit.dropped} == {(0.0, 1.0), (2.0, 1.0)}
    store.close()
    assert metrics(tmp_path / "run")["rollout/num_failed"] == 4


def test_steps_of_another_model_are_never_trained_on(tmp_path: Path) -> None:
    class Borrowed(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            messages = [{"role": "user", "content": task["word"]}]
            own = await self.rollout_engine.get_model_response(messages)
            other = await ScriptedEngine(["other"]).get_model_response(messages)
            for name, output in (("solver", own), ("judge", other)):
                path = Trajectory(steps=[Step.from_model_output(output, messages)], reward=every_other(int(uid[-1])))
                path.trainable = name == "solver" or not judge_is_frozen
                self.commit(name, trajectory=path)

    judge_is_frozen = True
    backend = trained(tmp_path, workflow_class=Borrowed)
    sampled = {tuple(output.completion_ids) for output in backend.inference.outputs}
    for sequence in backend.batches[0].sequences:
        assert {tuple(sequence.ids[span.start : span.stop]) for span in sequence.spans} <= sampled
    judge_is_frozen = False
    with pytest.raises(RolloutError, match=r"8 x CaptureError: trajectory 'judge': its step .* has tokens, but is not"):
        trained(tmp_path / "again", ONCE, workflow_class=Borrowed)


def test_max_steps_limits_agents_in_environments(tmp_path: Path) -> None:
    rollout = {**CONFIG["rollout"], "max_steps": 1}

    class Paying(TwoTurns):
        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return "more", every_other(self.idx), False, {}

        @staticmethod
        def from_dict(info: Any) -> TwoTurns:
            return Paying(info["word"])

    backend = trained(tmp_path, {"rollout": rollout}, agent_class=Echo, env_class=Paying)
    assert len(backend.inference.outputs) == 8


@pytest.mark.parametrize("reward", [math.nan, math.inf, "good"])
@pytest.mark.parametrize("of_steps", [False, True])
def test_rewards_must_be_finite_in_every_source(tmp_path: Path, reward: Any, of_steps: bool) -> None:
    def spoil(path: Trajectory) -> None:
        for item in path.steps if of_steps else [path]:
            item.reward = reward

    class BadReward(Echo):
        def update_from_model(self, response: str) -> Action:
            action = super().update_from_model(response)
            spoil(self.path)
            return action

        def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
            super().update_from_env(observation, reward, done, info)
            spoil(self.path)

    class BadRewardWorkflow(ReturnsItself):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid)
            for path in episode.trajectories:
                spoil(path)
            return episode

    message = rf"8 x AgentError: BadReward\w* returned the reward on trajectory '\w+' {reward!r}: use a finite number"
    text_fails_earlier = isinstance(reward, str)
    with pytest.raises(RolloutError, match="8 x AgentError: BadRewardWorkflow" if text_fails_earlier else message):
        trained(tmp_path / "workflow", ONCE, workflow_class=BadRewardWorkflow)
    with pytest.raises(RolloutError, match=message if not of_steps else "8 x"):
        trained(tmp_path / "agent", ONCE, agent_class=BadReward, env_class=TwoTurns)


def test_max_steps_of_a_workflow_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, {"rollout": {**CONFIG["rollout"], "max_steps": 3}}, workflow_class=SolverJudge)
    assert "rollout.max_steps=3 has no effect" in caplog.text


def text_agent(question: str) -> str:
    return question


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "nothing to roll out was given: give one of agent_run_func, agent_class and env_class, workflow_class"),
        (
            {"agent_run_func": print, "workflow_class": SolverJudge},
            "agent_run_func and workflow_class were given: give one",
        ),
        ({"agent_class": Echo}, "env_class is missing"),
        ({"env_class": TwoTurns}, "agent_class is missing"),
        ({"agent_run_func": 3}, "agent_run_func=3: use a function"),
        (
            {"agent_class": Echo, "env_class": TwoTurns, "agent_args": {"sistem": "x"}},
            r"Echo\(\*\*agent_args\): got an unexpected keyword argument 'sistem'",
        ),
        (
            {"agent_class": MathAgent, "env_class": TwoTurns, "agent_args": {"accumulate_thinkin": True}},
            r"unexpected keyword argument 'accumulate_thinkin'; did you mean 'accumulate_thinking'\?",
        ),
        (
            {"agent_class": Echo, "env_class": GridWorldEnv, "env_args": {"is_slipery": True}},
            r"env_args.is_slipery: GridWorldEnv .*'env_args.is_slippery'",
        ),
        (
            {"agent_class": Echo, "env_class": GymnasiumEnv, "env_args": {"env": "CartPole-v1", "map": 4}},
            "env_args.map: GymnasiumEnv .*env, env_kwargs, seed",
        ),
        (
            {"agent_class": Echo, "env_class": SingleTurnEnvironment, "env_args": {"reward_function": every_other}},
            "train_dataset: .*reward_fn",
        ),
        (
            {"agent_class": Echo, "env_class": ToolEnvironment, "env_args": {"tools": ["pyhton"]}},
            "tool='pyhton' is not known: did you mean 'python'",
        ),
        (
            {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_fn": print}},
            r"SimpleWorkflow\(\*\*workflow_args\): missing a required .*'reward_function'; did you mean 'reward_function'\?",
        ),
        (
            {"workflow_class": SolverJudge, "workflow_args": {"num_trys": 3}},
            "SolverJudge takes no argument 'num_trys': see its __init__",
        ),
        (
            {"workflow_class": Passing, "workflow_args": {"num_tries": 3, "gama": 0.9}},
            "Passing takes no argument 'gama': did you mean 'gamma'",
        ),
        (
            {
                "workflow_class": MultiTurnWorkflow,
                "workflow_args": {"agent_cls": Echo, "env_cls": TwoTurns, "agent_args": {"sistem": "x"}},
            },
            r"MultiTurnWorkflow\(\*\*workflow_args\): .* got an unexpected keyword argument 'sistem'",
        ),
        (
            {"workflow_class": MultiTurnWorkflow, "workflow_args": {"agent_cls": "echo", "env_cls": TwoTurns}},
            "agent_cls='echo'",
        ),
        (
            {"agent_class": PassingAgent, "env_class": TwoTurns, "agent_args": {"sistem": "x"}},
            r"PassingAgent\(\*\*agent_args\): .* got an unexpected keyword argument 'sistem'",
        ),
        (
            {"workflow_class": SolverJudge, "workflow_args": [3]},
            r"workflow_args=\[3\]",
        ),
        (
            {"agent_run_func": text_agent},
            "text_agent returns text .-> str.",
        ),
        ({"agent_class": Echo, "env_class": BaseEnv}, "env_class=BaseEnv has no from_dict, reset, step"),
        ({"workflow_class": Workflow}, "workflow_cls=Workflow has no run"),
        ({"workflow_class": Echo}, "rllm.workflows.workflow.Workflow"),
    ],
)
def test_invalid_rollout_source_is_rejected_before_the_run(
    tmp_path: Path, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentTrainer(train_dataset=TASKS, config={**CONFIG, "run_dir": str(tmp_path / "run")}, **source)
    assert not (tmp_path / "run").exists()


def test_workflow_may_use_its_engine_in_its_constructor(tmp_path: Path) -> None:
    AgentTrainer(
        train_dataset=TASKS,
        config={**CONFIG, "run_dir": str(tmp_path / "run")},
        workflow_class=NeedsItsEngine,
        workflow_args={"num_tries": 2},
    )


def test_custom_from_dict_gets_all_arguments(tmp_path: Path) -> None:
    AgentTrainer(
        train_dataset=TASKS,
        config={**CONFIG, "run_dir": str(tmp_path / "run")},
        agent_class=Echo,
        env_class=Drawn,
        env_args={"map": "abcd"},
    )
