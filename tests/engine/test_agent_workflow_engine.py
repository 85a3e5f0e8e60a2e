from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from rllm.agents.agent import Step, Trajectory
from rllm.engine.agent_workflow_engine import AgentWorkflowEngine
from rllm.engine.episode_log import EpisodeLog
from rllm.errors import ConfigError, InferenceError, PromptTooLongError, RolloutError, TokenMismatchError
from rllm.inference.engine import ModelOutput
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import Episode, TerminationReason
from rllm.workflows.workflow import TerminationEvent, Workflow

from .stepping import Talker


def shout(messages: list[dict[str, Any]]) -> str:
    text: str = messages[-1]["content"]
    return text.upper()


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Solve(Workflow):
    """One call, rewarded by the first letter of the task's word."""

    name = "solver"

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        output = await self.rollout_engine.get_model_response(ask(task["word"]))
        step = Step.from_model_output(output, ask(task["word"]))
        self.commit(self.name, trajectory=Trajectory(steps=[step], reward=float(task["word"].startswith("a"))))
        return None


def engine_of(workflow: type[Workflow] = Solve, **settings: Any) -> AgentWorkflowEngine:
    settings.setdefault("rollout_engine", ScriptedEngine(shout))
    return AgentWorkflowEngine(workflow, **settings)


async def episodes(workflow: type[Workflow], *words: str, **settings: Any) -> list[Episode]:
    return await engine_of(workflow, **settings).execute_tasks([{"word": word} for word in words])


def answers_of(trajectory: Trajectory) -> list[str]:
    return [decode(step.response_ids) for step in trajectory.steps]


# Contents of an episode


async def test_committed_trajectories_have_exact_tokens() -> None:
    model = ScriptedEngine(shout)
    (episode,) = await episodes(Solve, "apple", rollout_engine=model)
    (path,) = episode.trajectories
    (step,) = path.steps
    (output,) = model.outputs
    assert (step.prompt_ids, step.response_ids, step.logprobs) == (
        output.prompt_ids,
        output.completion_ids,
        output.logprobs,
    )
    assert (path.name, path.reward, episode.is_correct) == ("solver", 1.0, True)
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert episode.metrics["solver_acc"] == 1.0
    assert episode.metrics["rollout/num_calls"] == 1.0


async def test_results_are_in_the_order_of_the_tasks_and_ids_may_repeat() -> None:
    tasks = [{"word": word} for word in ("fig", "apple", "fig", "apple")]
    found = await engine_of().execute_tasks(tasks, ["A:1", "B", "A:1", "B"])
    assert [episode.id for episode in found] == ["A:1:0", "B:0", "A:1:1", "B:1"]
    assert [answers_of(episode.trajectories[0]) for episode in found] == [["FIG"], ["APPLE"]] * 2
    with pytest.raises(ConfigError, match="1 task_ids for 2 tasks"):
        await engine_of().execute_tasks(tasks[:2], ["A"])


async def test_parallel_solvers_keep_their_own_tokens_in_any_order_of_completion() -> None:
    class Crowd(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            async def solve(number: int) -> Trajectory:
                messages = ask(f"{task['word']} {number}")
                output = await self.rollout_engine.get_model_response(messages)
                return Trajectory(name="solver", steps=[Step.from_model_output(output, messages)], reward=float(number))

            for path in await asyncio.gather(*(solve(number) for number in range(4))):
                self.commit(trajectory=path)

    slow_first = ScriptedEngine(shout, latency_s=lambda messages: 0.02 * (4 - int(messages[-1]["content"][-1])))
    (episode,) = await episodes(Crowd, "fig", rollout_engine=slow_first)
    assert [(answers_of(path), path.reward) for path in episode.trajectories] == [
        ([f"FIG {number}"], float(number)) for number in range(4)
    ]
    assert "warnings" not in episode.info


async def test_steps_built_from_messages_are_joined_with_their_calls() -> None:
    class Rebuilt(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            steps = []
            for turn in range(3):
                messages = ask(f"{task['word']} {turn}")
                output = await self.rollout_engine.get_model_response(messages)
                answer = {"role": "assistant", "content": output.text}
                steps.append(Step(chat_completions=[*messages, answer], model_response=output.text))
            return Episode(trajectories=[Trajectory(steps=steps[::-1], reward=1.0)])

    (episode,) = await episodes(Rebuilt, "fig")
    assert answers_of(episode.trajectories[0]) == ["FIG 2", "FIG 1", "FIG 0"]


async def test_unnamed_roles_are_warned_about() -> None:
    class Unnamed(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            self.name = "agent"
            await super().run(task, uid)
            await super().run(task, uid)

    (episode,) = await episodes(Unnamed, "fig")
    assert "2 trajectories are all named 'agent'" in episode.info["warnings"][0]


async def test_arguments_reach_the_workflow_and_its_run_method() -> None:
    class Configured(Solve):
        def __init__(self, rollout_engine: Any, prefix: str, **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.prefix = prefix

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await super().run({"word": f"{self.prefix} {task['word']} {kwargs['suffix']}"}, uid)

    engine = engine_of(Configured, workflow_args={"prefix": "ripe"})
    (episode,) = await engine.execute_tasks([{"word": "fig"}], suffix="now")
    assert answers_of(episode.trajectories[0]) == ["RIPE FIG NOW"]


async def test_workflow_objects_are_reused_but_never_concurrently() -> None:
    class Counted(Solve):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)
            self.busy = False

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            assert not self.busy
            assert self._completed == []
            self.busy = True
            await asyncio.sleep(0.001)
            await super().run(task, uid)
            self.busy = False

    made: list[Any] = []
    found = await episodes(Counted, *["apple"] * 40, n_parallel_tasks=4)
    assert all(episode.is_correct for episode in found)
    assert len(made) == 4


async def test_class_that_is_not_thread_safe_runs_one_rollout_at_a_time() -> None:
    class Alone(Solve):
        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    assert engine_of(Alone, n_parallel_tasks=16).max_concurrent == 1


async def test_blocking_functions_run_outside_of_the_loop() -> None:
    class Blocking(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            assert await self.run_in_executor(threading.get_ident) != threading.get_ident()
            assert await self.run_in_executor(lambda a, b: a + b, 1, b=2) == 3
            assert await self.run_in_executor(asyncio.sleep, 0, result="awaited") == "awaited"
            await super().run(task, uid)

    (episode,) = await episodes(Blocking, "apple")
    assert episode.is_correct


# Termination


async def test_termination_event_ends_the_rollout_and_keeps_its_steps() -> None:
    class Ends(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await super().run(task, uid)
            raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    (episode,) = await episodes(Ends, "apple")
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (episode.failed, episode.is_correct) == (False, True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED), TerminationReason.MAX_TURNS_EXCEEDED),
        (PromptTooLongError("too long"), TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED),
        (InferenceError("busy"), TerminationReason.ERROR),
    ],
)
async def test_error_in_a_task_group_ends_the_rollout_with_its_reason(
    error: Exception, reason: TerminationReason
) -> None:
    class Together(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            async def fail() -> None:
                raise error

            await super().run(task, uid)
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

    (episode,) = await episodes(Together, "apple", retry_limit=1)
    assert episode.termination_reason is reason
    assert episode.info.get("error", {}).get("message") == (str(error) if episode.failed else None)


async def test_overlong_first_prompt_fails_once_with_a_named_error(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedEngine(shout, context_length=10)
    (episode,) = await episodes(Solve, "apple " * 10, rollout_engine=model)
    assert (episode.failed, episode.termination_reason) == (True, TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
    assert episode.info["error"]["type"] == "PromptTooLongError"
    assert "trying again" not in caplog.text


async def test_token_mismatch_in_a_task_group_stops_the_run() -> None:
    class Together(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            async def fail() -> None:
                raise TokenMismatchError("ids differ")

            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

    with pytest.raises(TokenMismatchError, match="ids differ"):
        await episodes(Together, "apple")


async def test_failed_rollout_is_retried_and_only_the_last_attempt_counts() -> None:
    class Unsteady(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            tried.append(uid)
            await super().run(task, uid)
            if tried.count(uid) < 3:
                raise RuntimeError("not yet")

    tried: list[str] = []
    (episode,) = await episodes(Unsteady, "apple", retry_limit=3)
    assert (len(tried), episode.failed, len(episode.trajectories)) == (3, False, 1)


async def test_rollout_that_always_fails_keeps_its_steps_and_affects_no_other() -> None:
    class Fails(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            tried.append(task["word"])
            await super().run(task, uid)
            if task["word"] == "fig":
                raise KeyError("stone")

    tried: list[str] = []
    words = ["apple", "fig", "avocado"]
    found = await episodes(Fails, *words, retry_limit=2)
    assert [episode.is_correct for episode in found] == [True, False, True]
    assert tried.count("fig") == 2
    error = found[1].info["error"]
    assert error["type"] == "AgentError"
    assert re.fullmatch(
        r"Fails.run raised KeyError: 'stone' \(at .*test_agent_workflow_engine.py:\d+\)", error["message"]
    )
    assert "raise KeyError" in error["traceback"]
    assert answers_of(found[1].trajectories[0]) == ["FIG"]
    with pytest.raises(RolloutError, match=r"1 of 3 rollouts failed; 1:0: AgentError: Fails.run raised KeyError"):
        await episodes(Fails, *words, retry_limit=1, raise_on_error=True)


async def test_server_failure_keeps_its_error_name() -> None:
    (episode,) = await episodes(Solve, "fig", rollout_engine=ScriptedEngine([InferenceError("gone", status_code=500)]))
    assert episode.info["error"]["type"] == "InferenceError"


async def test_timeout_of_the_workflow_is_not_retried(pass_time: Any) -> None:
    class Slow(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            tried.append(uid)
            await super().run(task, uid)
            pass_time(600)
            await asyncio.sleep(3600)

    tried: list[str] = []
    (episode,) = await episodes(Slow, "apple", workflow_args={"timeout": 600})
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert episode.failed
    assert len(tried) == 1
    assert answers_of(episode.trajectories[0]) == ["APPLE"]


async def test_hanging_thread_is_abandoned_at_the_deadline_with_its_object(pass_time: Any) -> None:
    class Hangs(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            if task["word"] == "fig":
                await self.run_in_executor(self.hang)
            await super().run(task, uid)

        def hang(self) -> None:
            hanging.set()
            released.wait(600)

    hanging, released, ended = threading.Event(), threading.Event(), asyncio.Event()
    engine = engine_of(Hangs, timeout_s=600)
    tasks = [{"word": "fig"}, {"word": "apple"}]
    run = asyncio.create_task(engine.execute_tasks(tasks, on_episode=lambda episode: ended.set()))
    await ended.wait()
    assert await asyncio.to_thread(hanging.wait, 60)
    pass_time(600)
    hung, sound = await run
    released.set()
    assert sound.is_correct
    assert "did not finish within timeout_s=600" in hung.info["error"]["message"]
    assert "Hangs" in hung.info["error"]["traceback"]
    assert len(engine._idle) == 1


async def test_token_mismatch_stops_the_run() -> None:
    class MissingLogprob(ScriptedEngine):
        async def get_model_response(self, *args: Any, **params: Any) -> ModelOutput:
            output = await super().get_model_response(*args, **params)
            output.logprobs = output.logprobs[1:]
            return output

    with pytest.raises(TokenMismatchError):
        await episodes(Solve, "fig", "apple", rollout_engine=MissingLogprob(shout))


@pytest.mark.parametrize(
    ("returned", "expected_message"),
    [
        ([1, 2], r"Odd.run returned \[1, 2\] of type list: return an Episode, or None after self.commit"),
        (0.5, "Odd.run returned 0.5 of type float"),
        (None, "Odd.run ended without a trajectory"),
    ],
)
async def test_invalid_return_value_names_the_workflow(returned: Any, expected_message: str) -> None:
    class Odd(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
            return returned

    (episode,) = await episodes(Odd, "fig", retry_limit=1)
    with pytest.raises(AssertionError, match=expected_message):
        raise AssertionError(episode.info["error"]["message"])


async def test_episodes_are_logged(tmp_path: Any) -> None:
    with EpisodeLog(tmp_path / "episodes.jsonl") as log:
        engine = engine_of(episode_logger=log)
        engine.set_training_step(7, mode="val")
        await engine.execute_tasks([{"word": "apple"}, {"word": "fig"}])
    kept = {episode.id: episode for episode in EpisodeLog.read(tmp_path / "episodes.jsonl")}
    assert kept.keys() == {"0:0", "1:0"}
    assert kept["0:0"].info["training"] == {"step": 7, "mode": "val", "epoch": 0}
    assert answers_of(kept["0:0"].trajectories[0]) == ["APPLE"]


class NotAsync(Workflow):
    def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (Workflow, "workflow_cls=Workflow has no run"),
        (dict, "rllm.workflows.workflow.Workflow"),
        (NotAsync, "NotAsync.run is not a coroutine: write `async def run"),
    ],
)
def test_unsuitable_class_is_rejected(workflow: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(workflow)


def test_constructor_error_is_reported_before_anything_starts() -> None:
    class Picky(Solve):
        def __init__(self, **kwargs: Any) -> None:
            raise ValueError("no")

    with pytest.raises(ConfigError, match=r"Picky\(\*\*workflow_args\) raised ValueError: no"):
        engine_of(Picky)
    with pytest.raises(ConfigError, match="Solve takes no argument 'max_trys': see its __init__"):
        engine_of(Solve, workflow_args={"max_trys": 3})
    with pytest.raises(ConfigError, match="Solve takes no argument 'gama': did you mean 'gamma'"):
        engine_of(Solve, workflow_args={"gama": 0.9})
    with pytest.raises(ConfigError, match=r"workflow_args=\[3\]"):
        engine_of(Solve, workflow_args=[3])


async def test_workflow_may_terminate_for_any_reason() -> None:
    class Ends(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await super().run(task, uid)
            raise TerminationEvent(TerminationReason(task["word"]))

    late, wrong = await episodes(Ends, "timeout", "error", retry_limit=1)
    assert late.termination_reason is TerminationReason.TIMEOUT
    assert (late.failed, answers_of(late.trajectories[0])) == (False, ["TIMEOUT"])
    assert wrong.failed
    assert "Ends.run ended itself with TerminationReason.ERROR" in wrong.info["error"]["message"]


# Isolation of rollouts


async def test_concurrent_runs_have_their_own_arguments() -> None:
    class Configured(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await asyncio.sleep(0.001)
            await super().run({"word": f"{task['word']} {kwargs['suffix']}"}, uid)

    engine = engine_of(Configured, n_parallel_tasks=1)
    runs = [engine.execute_tasks([{"word": "fig"}] * 3, suffix=suffix) for suffix in ("a", "b")]
    for found, expected in zip(await asyncio.gather(*runs), ("FIG A", "FIG B"), strict=True):
        assert [answers_of(episode.trajectories[0]) for episode in found] == [[expected]] * 3


async def test_task_that_outlives_its_rollout_adds_nothing_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    class LateCommit(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await super().run(task, uid)
            if task["word"] == "first":
                left.append(asyncio.create_task(self.late()))
            else:
                may_commit.set()
                await asyncio.wait(left)

        async def late(self) -> None:
            await may_commit.wait()
            self.commit("late", trajectory=Trajectory(steps=[Step()], reward=1.0))

    left: list[asyncio.Task[None]] = []
    may_commit = asyncio.Event()
    first, second = await episodes(LateCommit, "first", "second", n_parallel_tasks=1)
    assert [path.name for path in (*first.trajectories, *second.trajectories)] == ["solver", "solver"]
    assert "LateCommit: a task that has outlived its rollout committed 'late'" in caplog.text


async def test_nested_workflow_keeps_both_commits() -> None:
    class Outer(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            inner = Solve(self.rollout_engine)
            inner.reset(task=task, uid=uid)
            episode = await inner.run_with_termination_handling(task, uid)
            self.commit("inner", trajectory=episode.trajectories[0])
            await super().run(task, uid)

    (episode,) = await episodes(Outer, "apple")
    assert [path.name for path in episode.trajectories] == ["inner", "solver"]


async def test_agent_shared_by_all_objects_is_reported() -> None:
    class Team(Solve):
        def __init__(self, rollout_engine: Any, solver: Any, **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.solver = solver

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await asyncio.sleep(0.001)
            await super().run(task, uid)

    words = ["apple", "apple"]
    args = {"solver": Talker()}
    one_by_one = await episodes(Team, *words, workflow_args=args, n_parallel_tasks=1)
    assert all(episode.is_correct for episode in one_by_one)
    sound, refused = await episodes(Team, *words, workflow_args=args, retry_limit=1)
    assert sound.is_correct
    assert "Team.solver is one Talker object for all rollouts" in refused.info["error"]["message"]


async def test_equal_agents_are_not_considered_shared() -> None:
    @dataclass
    class Plain(Talker):
        system: str = ""

        def __post_init__(self) -> None:
            self.reset()

    class Team(Solve):
        def __init__(self, rollout_engine: Any, **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.solver = Plain()

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await asyncio.sleep(0.001)
            await super().run(task, uid)

    assert all(episode.is_correct for episode in await episodes(Team, "apple", "apple"))


async def test_changes_to_a_task_stay_within_its_attempt() -> None:
    class TaskMutator(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            seen.append(list(task["words"]))
            await super().run({"word": task["words"].pop()}, uid)
            if len(seen) == 1:
                raise RuntimeError("not yet")

    seen: list[list[str]] = []
    task = {"words": ["fig", "apple"]}
    found = await engine_of(TaskMutator, n_parallel_tasks=1).execute_tasks([task, task])
    assert seen == [["fig", "apple"]] * 3
    assert [episode.task for episode in found] == [{"words": ["fig", "apple"]}] * 2


def failing(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("hook")


async def failing_run(self: Any, task: Any, uid: str, **kwargs: Any) -> Any:
    raise ValueError("hook")


async def exiting(self: Any, task: Any, uid: str, **kwargs: Any) -> Any:
    raise SystemExit(1)


async def wrong_setting(self: Any, task: Any, uid: str, **kwargs: Any) -> Any:
    raise ConfigError("the task has no question")


async def odd_trajectory(self: Any, task: Any, uid: str, **kwargs: Any) -> Any:
    return Episode(trajectories=["text"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reset": failing}, "Odd.reset raised ValueError: hook"),
        ({"collect_trajectories": failing}, "Odd.run raised ValueError: hook"),
        ({"postprocess_episode": failing}, "Odd.run raised ValueError: hook"),
        ({"compute_trajectory_reward": failing}, "Odd.run raised ValueError: hook"),
        ({"run_with_termination_handling": failing_run}, "Odd.run_with_termination_handling raised ValueError: hook"),
        ({"run_with_termination_handling": odd_trajectory}, "'text' of type str among the trajectories of its episode"),
        ({"run": odd_trajectory}, "Odd.run raised AttributeError"),
        ({"run": exiting}, "called sys.exit(1)"),
        ({"run": exiting, "collect_trajectories": failing}, "called sys.exit(1)"),
        ({"run": wrong_setting}, "Odd.run raised ConfigError: the task has no question"),
    ],
)
async def test_error_in_a_hook_affects_no_other_rollout(changes: dict[str, Any], expected: str) -> None:
    odd = type("Odd", (Solve,), changes)

    def make(*args: Any, **kwargs: Any) -> Workflow:
        made.append(1)
        return (odd if len(made) == 1 else Solve)(*args, **kwargs)  # type: ignore[no-any-return]

    made: list[int] = []
    mixed = type("Odd", (Solve,), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})
    strange, sound = await episodes(mixed, "fig", "apple", retry_limit=1, n_parallel_tasks=1)
    assert sound.is_correct
    assert expected in strange.info["error"]["message"]


async def test_duplicate_trajectory_counts_once() -> None:
    class Twice(Solve):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:  # type: ignore[override]
            await super().run(task, uid)
            (path,) = self.collect_trajectories().trajectories
            return Episode(trajectories=[path, path])

    (episode,) = await episodes(Twice, "apple")
    assert len(episode.trajectories) == 1
    assert "the same trajectory was given more than once" in episode.info["warnings"][0]
