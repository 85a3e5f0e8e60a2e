from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.engine.agent_execution_engine import AgentExecutionEngine, AsyncAgentExecutionEngine
from rllm.environments.base.base_env import BaseEnv
from rllm.errors import ConfigError, InferenceError, RewardError
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import Episode, TerminationReason, is_scored

from .stepping import Countdown, Talker


def count(messages: list[dict[str, Any]]) -> str:
    """Answer with the number of the turn."""
    return f"turn {sum(message['role'] == 'assistant' for message in messages)}"


def engine_of(env: type[BaseEnv] = Countdown, agent: type[BaseAgent] = Talker, **settings: Any) -> AgentExecutionEngine:
    settings.setdefault("rollout_engine", ScriptedEngine(count))
    return AgentExecutionEngine(agent_class=agent, env_class=env, **settings)


async def episodes(tasks: list[dict[str, Any]], *args: Any, **settings: Any) -> list[Episode]:
    return await engine_of(*args, **settings).execute_episodes(tasks)


async def one(*args: Any, start: int = 2, **settings: Any) -> Episode:
    (episode,) = await episodes([{"start": start}], *args, **settings)
    return episode


def problem(episode: Episode) -> str:
    message: str = episode.info["error"]["message"]
    return message


# Contents of an episode


async def test_each_step_has_exact_tokens_and_its_observation() -> None:
    model = ScriptedEngine(count)
    (path,) = await engine_of(rollout_engine=model).execute_tasks([{"start": 2}])
    first, second = path.steps
    for step, output in zip(path.steps, model.outputs, strict=True):
        assert step.prompt_ids == output.prompt_ids
        assert step.response_ids == output.completion_ids
        assert step.logprobs == output.logprobs
    assert [decode(step.response_ids) for step in path.steps] == ["turn 0", "turn 1"]
    assert (first.observation, first.reward, first.done, first.info) == ("2 left", 0.0, False, {"action": "turn 0"})
    assert (second.observation, second.reward, second.done, second.info) == ("1 left", 1.0, True, {"action": "turn 1"})
    assert second.chat_completions[-1] == {"role": "assistant", "content": "turn 1"}
    assert (path.reward, path.name, path.task) == (1.0, "talker", {"start": 2})
    assert path.info["termination_reason"] == "env_done"


async def test_agent_can_read_the_number_of_remaining_steps() -> None:
    class Counts(Talker):
        def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
            left = info["max_steps"] - len(self.path.steps)
            super().update_from_env(f"{observation}, {left} steps", reward, done, info)

    (path,) = await engine_of(agent=Counts, max_steps=7).execute_tasks([{"start": 2}])
    assert [message["content"] for message in path.steps[-1].chat_completions[::2]] == [
        "2 left, 7 steps",
        "1 left, 6 steps",
    ]
    assert path.steps[-1].info == {"action": "turn 1"}, "a step keeps the environment's own info"


async def test_returns_are_discounted() -> None:
    (path,) = await engine_of(gamma=0.5).execute_tasks([{"start": 3}])
    assert [step.mc_return for step in path.steps] == [0.25, 0.5, 1.0]


async def test_results_are_in_the_order_of_the_tasks() -> None:
    class Model(ScriptedEngine):
        async def get_model_response(self, messages: Any, **params: Any) -> Any:
            if "3 left" in messages[0]["content"]:
                await short_ended.wait()
            return await super().get_model_response(messages, **params)

    def record(path: Any) -> int:
        lengths.append(num_steps := len(path.steps))
        if lengths[-2:] == [1, 1]:
            short_ended.set()
        return num_steps

    short_ended, lengths = asyncio.Event(), list[int]()
    tasks = [{"start": 3}, {"start": 1}, {"start": 3}, {"start": 1}]
    engine = engine_of(rollout_engine=Model(count))
    found = await engine.execute_tasks(tasks, on_episode=lambda episode: record(episode.trajectories[0]))
    assert [len(path.steps) for path in found] == [3, 1, 3, 1]
    short_ended.clear()
    assert [record(path) async for path in engine.trajectory_generator(tasks)] == [1, 1, 3, 3]


async def test_duplicate_task_is_attempted_twice() -> None:
    found = await episodes([{"id": "a:b", "start": 1}] * 2 + [{"start": 1}])
    assert [(episode.task_id, episode.index) for episode in found] == [("a:b", 0), ("a:b", 1), ("2", 0)]


async def test_task_without_id_is_identified_by_its_position() -> None:
    tasks: list[dict[str, Any]] = [{"id": None, "start": 1}, {"task_id": None, "id": 7, "start": 1}, {"start": 1}]
    assert [episode.id for episode in await episodes(tasks)] == ["0:0", "7:0", "2:0"]


async def test_arguments_reach_the_agent_the_environment_and_the_model() -> None:
    class Model(ScriptedEngine):
        async def get_model_response(self, messages: Any, **params: Any) -> Any:
            asked.append((messages[0]["content"], params["temperature"]))
            return await super().get_model_response(messages, **params)

    asked: list[tuple[str, float]] = []
    settings = {
        "agent_args": {"system": "Be brief."},
        "env_args": {"start": 1},
        "sampling_params": {"temperature": 0.5},
    }
    (episode,) = await episodes([{}], rollout_engine=Model(count), **settings)
    assert not episode.failed
    assert asked == [("Be brief.", 0.5)]


async def test_asynchronous_environments_run_on_the_loop() -> None:
    class Async(Countdown):
        async def step(self, action: Any) -> Any:  # type: ignore[override]
            threads.append(threading.current_thread())
            return super().step(action)

        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return Async(info["start"])

    threads: list[threading.Thread] = []
    assert (await one(Async)).is_correct
    assert set(threads) == {threading.current_thread()}


async def test_environments_that_are_not_thread_safe_share_one_thread() -> None:
    class Unsafe(Countdown):
        def step(self, action: Any) -> Any:
            threads.add(threading.get_ident())
            return super().step(action)

        @staticmethod
        def from_dict(info: Any) -> Countdown:
            threads.add(threading.get_ident())
            return Unsafe(info["start"])

        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    threads: set[int] = set()
    found = await episodes([{"start": 2}] * 8, Unsafe)
    assert all(episode.is_correct for episode in found)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_agent_may_create_its_step_on_observation() -> None:
    class Opener(Talker):
        def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
            super().update_from_env(observation, reward, done, info)
            self.path.steps.append(Step(observation=observation))

        def update_from_model(self, response: str) -> Action:
            self.path.steps[-1].action = response
            self.messages = [*self.messages, {"role": "assistant", "content": response}]
            return Action(response)

    episode = await one(agent=Opener)
    assert [decode(step.response_ids) for step in episode.trajectories[0].steps] == ["turn 0", "turn 1"]


async def test_reward_of_the_whole_rollout_is_final() -> None:
    class Judged(Countdown):
        def compute_final_reward(self) -> float:
            return np.float64(0.25)  # type: ignore[return-value]

        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return Judged(info["start"])

    episode = await one(Judged)
    assert [step.reward for step in episode.trajectories[0].steps] == [0.0, 0.25]
    assert episode.trajectories[0].reward == 0.25


def test_old_name_is_the_same_engine() -> None:
    assert AsyncAgentExecutionEngine is AgentExecutionEngine


@pytest.mark.parametrize(
    ("reward", "expected", "correct"), [(0.9, True, True), (1.0, np.False_, False), (0.9, None, False)]
)
async def test_environment_may_set_is_correct(reward: float, expected: Any, correct: bool) -> None:
    class Judging(Countdown):
        def step(self, action: Any) -> Any:
            return "done", reward, True, {} if expected is None else {"is_correct": expected}

    assert (await one(made_by(Judging))).is_correct is correct


@pytest.mark.parametrize("truncated", [True, np.bool_(True)])
async def test_environment_may_report_truncation(truncated: Any) -> None:
    class Cut(Countdown):
        def step(self, action: Any) -> Any:
            return "cut off", 0.0, True, {"truncated": truncated}

    assert (await one(made_by(Cut))).termination_reason is TerminationReason.MAX_TURNS_EXCEEDED


# Limits


async def test_turns_are_limited() -> None:
    episode = await one(start=9, max_steps=3)
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert len(episode.trajectories[0].steps) == 3
    assert episode.trajectories[0].reward == 0.0
    assert episode.trajectories[0].trainable


@pytest.mark.parametrize("start", [1, 9])
async def test_truncated_last_answer_sets_the_termination_reason(start: int) -> None:
    episode = await one(start=start, max_steps=1, sampling_params={"max_tokens": 3}, overlong_filter=True)
    (step,) = episode.trajectories[0].steps
    assert (decode(step.response_ids), step.reward) == ("tur", float(start == 1)), (
        "the truncated answer is still played and rewarded"
    )
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert not episode.trajectories[0].trainable


async def test_rollouts_ended_by_a_limit_can_be_excluded_from_training() -> None:
    episode = await one(start=9, max_steps=3, overlong_filter=True)
    assert not episode.trajectories[0].trainable
    assert "max_turns_exceeded" in episode.info["filtered"]
    assert (await one(start=2, max_steps=3, overlong_filter=True)).trajectories[0].trainable


async def test_total_tokens_of_all_turns_are_limited() -> None:
    # After the first prompt come "turn 0" and its end (7 tokens), the environment's "\n<user\n8 left>\n<assistant\n"
    # (26), and "turn 1" and its end (7): 40 in all. An answer beyond the limit is not kept.
    whole = await one(start=9, max_response_length=40, max_steps=2)
    assert [len(step.response_ids) for step in whole.trajectories[0].steps] == [7, 7]
    assert whole.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    for limit, lengths in [(39, [7]), (32, [7]), (7, [7]), (6, [6])]:
        cut = await one(start=9, max_response_length=limit, max_steps=2)
        assert cut.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
        assert [len(step.response_ids) for step in cut.trajectories[0].steps] == lengths


async def test_length_limits_may_apply_to_each_step() -> None:
    # Prompts of 25 and 58 tokens, and answers of 7.
    each = {"start": 9, "max_steps": 2, "enforce_max_prompt_length": True}
    for limits, reason, lengths in [
        ({"max_prompt_length": 58, "max_response_length": 7}, TerminationReason.MAX_TURNS_EXCEEDED, [7, 7]),
        ({"max_prompt_length": 57}, TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, [7]),
        ({"max_response_length": 6}, TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED, [6]),
    ]:
        episode = await one(**each, **limits)
        assert episode.termination_reason is reason
        assert [len(step.response_ids) for step in episode.trajectories[0].steps] == lengths


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 50}, {"max_completion_tokens": 50}])
async def test_truncated_answer_is_not_scored(asked: dict[str, int]) -> None:
    episode = await one(start=1, max_response_length=3, sampling_params=asked)
    (step,) = episode.trajectories[0].steps
    assert decode(step.response_ids) == "tur"
    assert (step.reward, step.action, episode.is_correct) == (0.0, None, False)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


async def test_overlong_first_prompt_fails_with_a_named_error() -> None:
    episode = await one(start=1, max_prompt_length=4)
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert "max_prompt_length=4: shorten the task" in problem(episode)


async def test_conversation_ends_at_the_context_limit() -> None:
    episode = await one(start=9, rollout_engine=ScriptedEngine(count, context_length=60), max_steps=9)
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert len(episode.trajectories[0].steps) == 2


# Failures: each on its own episode, with its name and the remedy


class Raises(Countdown):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no ground")


class RaisesReward(Countdown):
    def step(self, action: Any) -> Any:
        raise RewardError("reward function judge raised ZeroDivisionError: division by zero")


class ResetRaises(Countdown):
    def reset(self) -> Any:
        raise OSError("no map")


class ThreeValues(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", 1.0, True


class FiveValues(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", 1.0, True, False, {}


class BareReset(Countdown):
    def reset(self) -> Any:
        return "observation"


class TextReward(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", "good", True, {}


class NanReward(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", float("nan"), True, {}


class ListInfo(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", 1.0, True, ["info"]


class NoEnvironment(Countdown):
    @staticmethod
    def from_dict(info: Any) -> Any:
        return None


def made_by(env: type[Countdown]) -> type[Countdown]:
    class Made(env):  # type: ignore[valid-type,misc]
        @staticmethod
        def from_dict(info: Any) -> Any:
            return env(info["start"])

    Made.__name__ = env.__name__
    return Made


@pytest.mark.parametrize(
    ("env", "kind", "message"),
    [
        (made_by(Raises), "EnvError", "Raises.step raised RuntimeError: no ground"),
        (made_by(RaisesReward), "RewardError", "judge raised ZeroDivisionError"),
        (made_by(ResetRaises), "EnvError", "ResetRaises.reset raised OSError: no map"),
        (made_by(ThreeValues), "EnvError", r"ThreeValues.step returned 3 values: return \(observation, reward, done"),
        (made_by(FiveValues), "EnvError", "5 values: .*GymnasiumEnv"),
        (made_by(BareReset), "EnvError", "BareReset.reset returned 'observation' of type str: return"),
        (made_by(TextReward), "EnvError", "TextReward.step, as the reward, returned 'good' of type str"),
        (made_by(NanReward), "EnvError", "NanReward.step, as the reward, returned the reward nan"),
        (made_by(ListInfo), "EnvError", "ListInfo.step returned the info .* of type list: return a dict"),
        (NoEnvironment, "EnvError", "NoEnvironment.from_dict returned None of type NoneType: return an environment"),
    ],
)
async def test_environment_error_is_attributed_to_it(env: type[BaseEnv], kind: str, message: str) -> None:
    class Mixed(Countdown):
        """Environment that is faulty for every second task."""

        @staticmethod
        def from_dict(info: Any) -> Any:
            return env.from_dict(info) if info["faulty"] else Countdown(info["start"])

    faulty, sound = await episodes([{"start": 2, "faulty": True}, {"start": 2, "faulty": False}], Mixed)
    assert sound.is_correct
    assert faulty.info["error"]["type"] == kind
    assert faulty.termination_reason is TerminationReason.ERROR
    if env is not NoEnvironment:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(problem(faulty))


def silent(self: Any, response: str) -> Action:
    return Action(response)


def undecided(self: Any, response: str) -> None:
    self.path.steps.append(Step())


def raising(self: Any, *args: Any) -> Any:
    raise KeyError("thought")


def adding(**fields: Any) -> Any:
    def update_from_model(self: Any, response: str) -> Action:
        self.path.steps.append(Step(**fields))
        return Action(response)

    return update_from_model


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"update_from_model": raising}, "Broken.update_from_model raised KeyError: 'thought'"),
        ({"update_from_env": raising}, "Broken.update_from_env raised KeyError: 'thought'"),
        ({"update_from_model": silent}, "Broken.update_from_model added no step: append one Step"),
        ({"update_from_model": undecided}, "Broken.update_from_model returned None: return the Action"),
        (
            {"update_from_model": adding(chat_completions=5)},
            "completing the step of Broken raised TypeError: 'int' object",
        ),
        ({"update_from_model": adding(model_response=np.arange(2))}, "completing the step of Broken raised ValueError"),
        (
            {"update_from_model": adding(info=5)},
            "completing the info of the step of Broken raised TypeError: 'int' object",
        ),
        ({"chat_completions": []}, "Broken.chat_completions is empty: update_from_env must add a message"),
    ],
)
async def test_agent_error_is_attributed_to_it(changes: dict[str, Any], expected: str) -> None:
    episode = await one(
        agent=type("Broken", (Talker,), changes), agent_args={"more": 1} if "__init__" in changes else {}
    )
    assert episode.info["error"]["type"] == "AgentError"
    assert expected in problem(episode)


async def test_steps_before_a_failure_are_kept_but_not_trained() -> None:
    class FailingStep(Countdown):
        def step(self, action: Any) -> Any:
            if self.left == 1:
                raise RuntimeError("fell")
            return super().step(action)

    (path,) = await engine_of(made_by(FailingStep)).execute_tasks([{"start": 3}])
    assert [decode(step.response_ids) for step in path.steps] == ["turn 0", "turn 1", "turn 2"]
    assert path.info["error"]["message"].startswith("FailingStep.step raised RuntimeError: fell (at ")
    assert not path.trainable
    assert not is_scored(path.reward)


async def test_unscored_rewards_can_be_summed() -> None:
    class Unjudged(Countdown):
        def step(self, action: Any) -> tuple[Any, float | None, bool, dict[str, Any]]:
            observation, reward, done, info = super().step(action)
            return observation, reward or None, done, info

        @staticmethod
        def from_dict(info: Any) -> Unjudged:
            return Unjudged(info["start"])

    class Counting(Talker):
        earned = 0.0

        def update_from_env(self, observation: Any, reward: float | None, done: bool, info: dict[str, Any]) -> None:
            self.earned += reward  # type: ignore[operator]
            super().update_from_env(self.earned, reward, done, info)

    [path] = await engine_of(Unjudged, Counting).execute_tasks([{"start": 3}])
    assert [is_scored(step.reward) for step in path.steps] == [False, False, True]
    assert sum(step.reward for step in path.steps) == path.reward == 1.0


async def test_unscored_step_is_not_zero() -> None:
    class Unscored(Countdown):
        def step(self, action: Any) -> Any:
            observation, _, done, info = super().step(action)
            return observation, None, done, info

    episode = await one(made_by(Unscored))
    assert not episode.failed
    assert episode.trajectories[0].final_reward() is None
    assert "'talker'" in episode.info["unscored"]


async def test_unserializable_observation_is_a_warning() -> None:
    class Odd(Countdown):
        def reset(self) -> Any:
            return {"board": object()}, {}

    episode = await one(made_by(Odd))
    assert episode.is_correct
    assert "Odd: an observation of type dict cannot be kept as JSON" in episode.info["warnings"][0]


async def test_arrays_are_valid_observations() -> None:
    class Arrays(Countdown):
        def reset(self) -> Any:
            return {"board": np.zeros(3), 1: np.float32(2)}, {}

    assert (await one(made_by(Arrays))).info == {}


async def test_transient_server_error_is_retried() -> None:
    answers = iter([InferenceError("busy", status_code=503)])
    engine = engine_of(rollout_engine=ScriptedEngine(lambda messages: next(answers, "fine")), retry_limit=2)
    engine._settings["retry_delay_s"] = 0.0
    (episode,) = await engine.execute_episodes([{"start": 2}])
    assert episode.is_correct
    assert len(episode.trajectories[0].steps) == 2


# Hanging calls


class HangingReset(Countdown):
    def reset(self) -> Any:
        wait_without_end()


class HangingStep(Countdown):
    def step(self, action: Any) -> Any:
        wait_without_end()


class HangingReward(Countdown):
    def compute_final_reward(self) -> Any:
        wait_without_end()


class HangingClose(Countdown):
    def close(self) -> None:
        wait_without_end()


class HangingCoroutine(Countdown):
    async def step(self, action: Any) -> Any:  # type: ignore[override]
        hanging.release()
        await asyncio.sleep(3600)


released = threading.Event()
hanging = threading.Semaphore(0)
"""Released once by each call that starts to hang."""


def wait_without_end() -> None:
    hanging.release()
    released.wait(600)


async def some_hang(number: int = 1) -> None:
    """Wait until this number of further calls hang."""
    for _ in range(number):
        assert await asyncio.to_thread(hanging.acquire, timeout=60)


@pytest.fixture
def release_hanging() -> Any:
    released.clear()
    while hanging.acquire(blocking=False):
        pass
    yield
    released.set()


@pytest.mark.parametrize("env", [HangingReset, HangingStep, HangingReward, HangingCoroutine])
async def test_hanging_environment_is_cancelled_at_its_deadline_and_logged(
    release_hanging: Any, pass_time: Any, env: type[Countdown], caplog: pytest.LogCaptureFixture
) -> None:
    class Mixed(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Any:
            return (env if info["hangs"] else Countdown)(1)

    ended: asyncio.Queue[Episode] = asyncio.Queue()
    tasks = [{"hangs": number == 1} for number in range(4)]
    engine = engine_of(Mixed, trajectory_timeout=600, max_workers=2)
    run = asyncio.create_task(engine.execute_episodes(tasks, on_episode=ended.put_nowait))
    assert all([(await ended.get()).is_correct for _ in range(3)])
    await some_hang()
    pass_time(600)
    found = await run
    assert [episode.is_correct for episode in found] == [True, False, True, True]
    stuck = found[1]
    assert stuck.termination_reason is TerminationReason.TIMEOUT
    assert "rollout 1:0 did not finish within timeout_s=600" in problem(stuck)
    place = "asyncio.sleep(3600)" if env is HangingCoroutine else "in wait_without_end"
    assert place in stuck.info["error"]["traceback"]
    assert place in caplog.text
    assert "rllm/engine" not in caplog.text, "the engine's own frames are left out"


async def test_hanging_model_call_is_cancelled(pass_time: Any) -> None:
    model = ScriptedEngine(count, latency_s=lambda messages: 3600 if "2 left" in messages[0]["content"] else 0)
    engine = engine_of(rollout_engine=model, trajectory_timeout=600)
    ended = asyncio.Event()
    run = asyncio.create_task(
        engine.execute_episodes([{"start": 2}, {"start": 1}], on_episode=lambda episode: ended.set())
    )
    await ended.wait()
    while model.num_calls < 2:  # noqa: ASYNC110  # the model has no event
        await asyncio.sleep(0.001)
    pass_time(600)
    hung, sound = await run
    assert sound.is_correct
    assert "get_model_response" in hung.info["error"]["traceback"]


async def test_environment_that_fails_to_close_is_logged(
    release_hanging: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rllm.workflows.environment.CLOSE_S", 0.05)
    assert (await one(made_by(HangingClose))).is_correct
    assert "HangingClose.close failed (TimeoutError" in caplog.text


async def test_environments_are_closed_after_any_outcome(
    release_hanging: Any, pass_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.workflows.environment.CLOSE_S", 60.0)
    monkeypatch.setattr(Countdown, "closed", [])
    await episodes([{"start": 1}])
    await episodes([{"start": 7}], made_by(Raises))
    hung = asyncio.create_task(episodes([{"start": 5}], made_by(HangingCoroutine), trajectory_timeout=600))
    await some_hang()
    pass_time(600)
    await hung
    assert Countdown.closed == [0, 7, 5]


@pytest.mark.parametrize("thread_safe", [True, False])
async def test_hanging_rollouts_free_their_slots(release_hanging: Any, pass_time: Any, thread_safe: bool) -> None:
    class Mixed(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Any:
            return (HangingStep if info["hangs"] else Countdown)(1)

        @staticmethod
        def is_multithread_safe() -> bool:
            return thread_safe

    num_hung, num_places = (40, 8) if thread_safe else (6, 1)
    tasks = [{"hangs": number < num_hung} for number in range(num_hung + 20)]
    ended: asyncio.Queue[Episode] = asyncio.Queue()
    engine = engine_of(Mixed, trajectory_timeout=1000, max_workers=8)
    run = asyncio.create_task(engine.execute_episodes(tasks, on_episode=ended.put_nowait))
    for _ in range(num_hung // num_places):
        await some_hang(num_places)
        pass_time(1000 / 20)
    assert all([(await ended.get()).is_correct for _ in range(20)])
    pass_time(1000)
    found = await run
    assert [episode.is_correct for episode in found] == [not task["hangs"] for task in tasks]


async def test_concurrent_runs_share_one_thread_and_do_not_stop_it() -> None:
    class Unsafe(Countdown):
        def step(self, action: Any) -> Any:
            threads.add(threading.get_ident())
            return super().step(action)

        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return Unsafe(info["start"])

        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    threads: set[int] = set()
    engine = engine_of(Unsafe, max_steps=30)
    short, long = await asyncio.gather(
        engine.execute_episodes([{"start": 1}]), engine.execute_episodes([{"start": 20}, {"start": 20}])
    )
    assert all(episode.is_correct for episode in (*short, *long))
    assert len(threads) == 1
    assert not engine._calls


@pytest.mark.parametrize("held", [False, True])
def test_engine_can_be_used_from_several_event_loops(held: bool) -> None:
    engine = engine_of(max_workers=1)
    with engine if held else contextlib.nullcontext():
        for _ in range(3):
            found = asyncio.run(engine.execute_episodes([{"start": 2}] * 8))
            assert all(episode.is_correct for episode in found)
    assert not engine._calls


async def test_cancellation_closes_every_environment_and_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Countdown, "closed", [])
    model = ScriptedEngine(count, latency_s=3600)
    before = asyncio.all_tasks()
    run = asyncio.create_task(engine_of(rollout_engine=model).execute_tasks([{"start": 2}] * 5))
    while model.num_calls < 5:  # noqa: ASYNC110  # the model has no event
        await asyncio.sleep(0.001)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert Countdown.closed == [2] * 5
    assert asyncio.all_tasks() == before


async def test_closing_a_generator_early_closes_running_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(messages: list[dict[str, Any]]) -> float:
        if "2 left" not in messages[0]["content"]:
            return 0
        asked.set()
        return 3600

    monkeypatch.setattr(Countdown, "closed", [])
    asked = asyncio.Event()
    model = ScriptedEngine(count, latency_s=seconds)
    generator = engine_of(rollout_engine=model).trajectory_generator([{"start": 2}, {"start": 1}])
    assert len((await anext(generator)).steps) == 1
    await asked.wait()  # the other rollout has created its environment
    await generator.aclose()  # type: ignore[attr-defined]
    assert Countdown.closed == [0, 2]


# Agents with unusual state


class OneList(Talker):
    """Agent that keeps one list of messages, and puts it into all its steps."""

    def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
        self.messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        self.path.steps.append(Step(action=response, chat_completions=self.messages))
        return Action(response)


class Forgetful(Talker):
    """Agent that keeps only its newest step, as a copy, and starts a new list for it."""

    def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
        super().update_from_env(observation, reward, done, info)
        self.path.steps = [dataclasses.replace(step) for step in self.path.steps[-1:]]


class ClassWide(Talker):
    """Agent class whose objects share one trajectory, which is never emptied."""

    shared = Trajectory(name="shared")

    def reset(self) -> None:
        super().reset()
        self.path = self.shared


class Fresh(Talker):
    """Agent that creates a new trajectory at each access."""

    @property
    def trajectory(self) -> Trajectory:
        return dataclasses.replace(self.path, steps=list(self.path.steps))


@pytest.mark.parametrize("agent", [OneList, Forgetful, ClassWide, Fresh])
async def test_steps_are_snapshots(agent: type[BaseAgent]) -> None:
    for episode in await episodes([{"start": 3}] * 4, agent=agent):
        (path,) = episode.trajectories
        assert [decode(step.response_ids) for step in path.steps] == ["turn 0", "turn 1", "turn 2"]
        assert [len(step.chat_completions) for step in path.steps] == [2, 4, 6]
        assert [step.reward for step in path.steps] == [0.0, 0.0, 1.0]
        assert path.reward == 1.0


async def test_changes_to_a_task_stay_within_its_rollout() -> None:
    class TaskMutator(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return TaskMutator(info["starts"].pop())

    task = {"starts": [1, 2]}
    found = await episodes([task] * 3, TaskMutator)
    assert [len(episode.trajectories[0].steps) for episode in found] == [2, 2, 2]
    assert all(episode.task == task == {"starts": [1, 2]} for episode in found)


class ReadOnlyIndex(Countdown):
    idx = property(lambda self: 0)  # type: ignore[assignment]


class Exits(Countdown):
    def step(self, action: Any) -> Any:
        raise SystemExit(2)


class WrongRow(Countdown):
    def reset(self) -> Any:
        raise ConfigError("map='': draw one")


class ArrayDone(Countdown):
    def step(self, action: Any) -> Any:
        return "observation", 1.0, np.array([True, False]), {}


class BareObservation(Countdown):
    def reset(self) -> Any:
        return object(), {}


class PassesOn(Talker):
    def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
        self.messages = [*self.messages, {"role": "user", "content": observation}]


class NoTrajectory(Talker):
    trajectory = property(raising)  # type: ignore[assignment]


class WrongTrajectory(Talker):
    trajectory = property(lambda self: {"steps": []})  # type: ignore[assignment]


class WrongState(Talker):
    def get_current_state(self) -> Any:
        return {"action": "x"}


@pytest.mark.parametrize(
    ("env", "agent", "kind", "expected"),
    [
        (ReadOnlyIndex, Talker, "EnvError", "setting idx of ReadOnlyIndex raised AttributeError"),
        (Exits, Talker, "AgentError", "rollout 0:0 called sys.exit(2)"),
        (WrongRow, Talker, "AgentError", "rollout 0:0: map='': draw one"),
        (ArrayDone, Talker, "EnvError", "ArrayDone.step, as done, raised ValueError"),
        (BareObservation, PassesOn, "AgentError", "asking the model with PassesOn.chat_completions raised TypeError"),
        (Countdown, NoTrajectory, "AgentError", "NoTrajectory.trajectory raised KeyError: 'thought'"),
        (Countdown, WrongTrajectory, "AgentError", "WrongTrajectory.trajectory raised"),
        (Countdown, WrongState, "AgentError", "WrongState.update_from_model added no step"),
    ],
)
async def test_faulty_user_classes_do_not_affect_other_rollouts(
    env: type[Countdown], agent: type[Talker], kind: str, expected: str
) -> None:
    class Sometimes(Talker):
        """Agent that is faulty only in the first rollout."""

        def __new__(cls) -> Any:
            made.append(cls)
            return (agent if len(made) == 2 else Talker)()  # the engine creates the first one to check the class

    class Mixed(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Any:
            return (env if info["strange"] else Countdown)(1)

    made: list[type] = []

    tasks = [{"strange": True}, {"strange": False}]
    strange, sound = await episodes(tasks, Mixed, Sometimes, n_parallel_agents=1)
    assert sound.is_correct
    assert strange.info["error"]["type"] == kind
    assert expected in problem(strange)


# Settings


class NoStep(Talker):
    update_from_model = None  # type: ignore[assignment]


class Abstract(BaseAgent):
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent": Abstract}, "agent_class=Abstract has no trajectory, update_from_env, update_from_model: define"),
        ({"agent": Talker()}, "agent_class=<.*Talker.*>"),
        ({"agent_args": {"sistem": "x"}}, r"Talker\(\*\*agent_args\) raised TypeError: .*'sistem'"),
        ({"env": dict}, "env_class=dict has no reset, step, from_dict"),
        ({"engine_name": "verl", "rollout_engine": None}, "engine_name='verl': use 'openai', or give rollout_engine"),
        ({"rollout_engine": None, "rollout_engine_args": {"modle": "x"}}, "rollout_engine_args=.*modle"),
        ({"rollout_engine": "gpt-4"}, "rollout_engine='gpt-4'"),
        ({"agent_args": ["x"]}, r"agent_args=\['x'\]"),
        ({"env_args": 3}, "env_args=3"),
        ({"max_steps": 0}, "max_steps=0: use a whole number of at least 1"),
        ({"max_prompt_length": True}, "max_prompt_length=True"),
        ({"n_parallel_agents": 0}, "max_concurrent=0: use at least 1"),
        ({"trajectory_timeout": -1}, "timeout_s=-1"),
    ],
)
def test_invalid_settings_are_reported_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(**settings)


def test_settings_for_the_rllm_framework_are_accepted() -> None:
    named = {"model": "policy", "base_url": "http://127.0.0.1:9/v1"}
    settings = {"tokenizer": object(), "chat_parser": object(), "config": {}, "api_retries": 5}
    engine = engine_of(rollout_engine=None, rollout_engine_args=named, **settings)
    assert engine.rollout_engine._client_settings["max_retries"] == 5


def test_model_name_may_be_a_sampling_parameter() -> None:
    server = {"base_url": "http://127.0.0.1:9/v1"}
    engine = engine_of(rollout_engine=None, rollout_engine_args=server, sampling_params={"model": "policy"})
    assert engine.rollout_engine.inference.model == "policy"
    named = {**server, "model": "other"}
    engine = engine_of(rollout_engine=None, rollout_engine_args=named, sampling_params={"model": "policy"})
    assert engine.rollout_engine.inference.model == "other"


async def test_task_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"tasks\[1\]='two': use a mapping"):
        await engine_of().execute_tasks([{"start": 1}, "two"])  # type: ignore[list-item]


# Many rollouts


@pytest.mark.slow
async def test_thousands_of_concurrent_rollouts_lose_nothing() -> None:
    class Gated(Countdown):
        async def reset(self) -> Any:  # type: ignore[override]
            live.append(self)
            if len(live) == 1000:
                all_here.set()
            await all_here.wait()
            return super().reset()

    live: list[Any] = []
    all_here = asyncio.Event()
    tasks = [{"start": 1 + number % 3} for number in range(1200)]
    found = await engine_of(made_by(Gated), n_parallel_agents=1000).execute_tasks(tasks)
    assert [len(path.steps) for path in found] == [task["start"] for task in tasks]
    assert all(path.reward == 1.0 for path in found)
