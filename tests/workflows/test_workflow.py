from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.errors import ConfigError
from rllm.rewards.reward_types import RewardOutput
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import Episode, TerminationReason
from rllm.workflows.multi_turn_workflow import CumulativeWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
from rllm.workflows.simple_workflow import SimpleAgent, SimpleWorkflow
from rllm.workflows.workflow import TerminationEvent, Workflow

from ..engine.stepping import Countdown, Talker


class Scripted(Workflow):
    """Workflow that runs a function of the test."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
        return task["do"](self)


async def run(workflow: Workflow, do: Any = None, **task: Any) -> Episode:
    task = {"do": do, **task} if do else task
    workflow.reset(task=task, uid="t:0")
    return await workflow.run_with_termination_handling(task, "t:0")


def path_of(*rewards: float | None, name: str = "agent") -> Trajectory:
    return Trajectory(name=name, steps=[Step(reward=reward) for reward in rewards])


async def test_commit_is_a_copy() -> None:
    def do(workflow: Workflow) -> None:
        path = path_of(1.0)
        workflow.commit("first", trajectory=path)
        path.steps[0].reward = 0.0
        workflow.commit("second", trajectory=path)

    episode = await run(Scripted(), do)
    assert [(path.name, path.reward) for path in episode.trajectories] == [("first", 1.0), ("second", 0.0)]
    assert episode.metrics == {"first_acc": 1.0, "second_acc": 0.0}


async def test_commit_copies_plain_data_and_shares_other_objects() -> None:
    client = threading.Lock()  # which cannot be copied

    def do(workflow: Workflow) -> None:
        answer = [{"role": "user", "content": "hi"}]
        path = Trajectory(
            task={"client": client}, steps=[Step(chat_completions=answer, info={"turns": [1]})], reward=1.0
        )
        workflow.commit(trajectory=path)
        answer.append({"role": "user", "content": "later"})
        path.steps[0].info["turns"].append(2)
        path.steps.append(Step())

    (path,) = (await run(Scripted(), do)).trajectories
    (step,) = path.steps
    assert path.task["client"] is client
    assert (len(step.chat_completions), step.info) == (1, {"turns": [1]})


async def test_invalid_reward_is_reported_at_commit() -> None:
    def do(workflow: Workflow) -> None:
        workflow.commit("solver", trajectory=Trajectory(steps=[Step()], reward=RewardOutput(reward=1.0)))  # type: ignore[arg-type]

    error = (await run(Scripted(), do)).info["error"]
    assert error["message"].startswith("Scripted.commit was given RewardOutput")
    assert error["message"].endswith(" as the reward of 'solver': use a number, or None for 'not scored'")


async def test_agents_in_public_attributes_are_collected_unless_committed() -> None:
    class Team(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.solver, self.judge, self._hidden = Talker(), Talker(), Talker()

    def do(workflow: Any) -> None:
        for agent in (workflow.solver, workflow.judge, workflow._hidden):
            agent.path = path_of(1.0)
        workflow.commit("kept", agent=workflow.solver)

    episode = await run(Team(), do)
    assert [path.name for path in episode.trajectories] == ["kept", "judge"]


async def test_commit_may_reset_the_agent_for_its_next_attempt() -> None:
    class Tries(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.solver = Talker()

    def do(workflow: Any) -> None:
        for reward in (0.0, 1.0):
            workflow.solver.path = path_of(reward)
            workflow.commit("solver", agent=workflow.solver, reset=True)

    episode = await run(Tries(), do)
    assert [path.reward for path in episode.trajectories] == [0.0, 1.0]
    assert episode.metrics == {"solver_acc": 0.5}


async def test_rewards_are_summed_discounted_and_shaped() -> None:
    def committed(workflow: Workflow) -> None:
        workflow.commit(trajectory=path_of(0.0, 1.0, 0.5))

    (plain,) = (await run(Scripted(), committed)).trajectories
    assert plain.reward == 1.5
    (discounted,) = (await run(Scripted(gamma=0.5), committed)).trajectories
    assert [step.reward for step in discounted.steps] == [0.625, 1.25, 0.5]
    (bonus,) = (await run(Scripted(reward_bonus_coeff=0.5), committed)).trajectories
    assert [step.reward for step in bonus.steps] == [0.0, 1.5, 0.25]
    (partly,) = (await run(Scripted(), lambda workflow: workflow.commit(trajectory=path_of(1.0, None)))).trajectories
    assert [step.reward for step in partly.steps] == [1.0, None]


@pytest.mark.parametrize("shaping", [{}, {"gamma": 0.5}, {"reward_bonus_coeff": 0.5}])
async def test_unscored_rewards_stay_unscored(shaping: dict[str, float]) -> None:
    episode = await run(Scripted(**shaping), lambda workflow: workflow.commit(trajectory=Trajectory(steps=[Step()])))
    assert episode.trajectories[0].final_reward() is None
    assert not episode.is_correct
    assert episode.metrics == {}


async def test_hooks_can_be_overridden() -> None:
    class Own(Scripted):
        def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
            trajectory.reward = max(float(step.reward or 0) for step in trajectory.steps)

        def assign_episode_correctness(self, episode: Episode) -> None:
            episode.is_correct = all(path.reward == 2.0 for path in episode.trajectories)

        def collect_metrics(self, episode: Episode) -> None:
            episode.metrics["tries"] = float(len(episode.trajectories))

    episode = await run(Own(), lambda workflow: workflow.commit(trajectory=path_of(2.0, 1.0)))
    assert (episode.trajectories[0].reward, episode.is_correct, episode.metrics) == (2.0, True, {"tries": 1.0})


@pytest.mark.parametrize(("expected", "is_correct"), [(False, False), (True, True), (None, True)])
async def test_fields_of_a_returned_episode_are_kept(expected: bool | None, is_correct: bool) -> None:
    paths = [path_of(1.0, name="solver"), path_of(0.0, name="judge")]

    def do(workflow: Workflow) -> Episode:
        return Episode(trajectories=paths, is_correct=expected, metrics={"solver_acc": 0.25})

    episode = await run(Scripted(), do)
    assert episode.is_correct is is_correct, "rewards decide only if the episode does not"
    assert episode.metrics == {"solver_acc": 0.25, "judge_acc": 0.0}


async def test_episode_postprocessed_by_run_is_not_shaped_again() -> None:
    def do(workflow: Workflow) -> Episode:
        workflow.commit(trajectory=path_of(0.0, 1.0, 0.5))
        return workflow.postprocess_episode(workflow.collect_trajectories(), TerminationReason.MAX_TURNS_EXCEEDED)

    episode = await run(Scripted(gamma=0.5), do)
    assert [step.reward for step in episode.trajectories[0].steps] == [0.625, 1.25, 0.5]
    assert (episode.is_correct, episode.termination_reason) == (True, TerminationReason.MAX_TURNS_EXCEEDED)


async def test_any_outcome_without_an_engine_is_an_episode() -> None:
    def fail(workflow: Workflow) -> None:
        workflow.commit(trajectory=path_of(1.0))
        raise ZeroDivisionError("by zero")

    episode = await run(Scripted(), fail)
    assert episode.termination_reason is TerminationReason.ERROR
    assert (episode.info["error"]["type"], episode.info["error"]["message"]) == ("ZeroDivisionError", "by zero")
    assert len(episode.trajectories) == 1

    def end(workflow: Workflow) -> None:
        raise TerminationEvent

    assert (await run(Scripted(), end)).termination_reason is TerminationReason.UNKNOWN


async def test_commit_requires_an_agent_or_trajectory() -> None:
    episode = await run(Scripted(), lambda workflow: workflow.commit("nothing"))
    assert "an agent or a trajectory" in episode.info["error"]["message"]


async def test_trajectory_without_steps_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    episode = await run(Scripted(), lambda workflow: workflow.commit("empty", trajectory=Trajectory()))
    assert episode.trajectories == []
    assert "the trajectory 'empty' has no steps" in caplog.text


# Ready-made workflows


def last_word(task: dict[str, Any], answer: str) -> float:
    return float(answer.split()[-1] == task["answer"])


@pytest.mark.parametrize("key", ["question", "prompt", "problem"])
async def test_simple_workflow_calls_once_and_scores(key: str) -> None:
    model = ScriptedEngine(["It is four"])
    workflow = SimpleWorkflow(model, reward_function=last_word, system_prompt="Be brief.", name="solver")
    episode = await run(workflow, **{key: "2 + 2?", "answer": "four"})
    (path,) = episode.trajectories
    assert (path.name, path.reward, episode.is_correct) == ("solver", 1.0, True)
    assert [message["content"] for message in path.steps[0].chat_completions] == ["Be brief.", "2 + 2?", "It is four"]
    assert decode(path.steps[0].response_ids) == "It is four"


async def test_simple_agent_holds_the_steps_of_its_workflow() -> None:
    class Asks(Workflow):
        def __init__(self, rollout_engine: Any) -> None:
            super().__init__(rollout_engine)
            self.agent = SimpleAgent()

        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            messages = [{"role": "user", "content": task["question"]}]
            output = await self.rollout_engine.get_model_response(messages, application_id=uid)
            self.agent.trajectory.steps.append(Step(chat_completions=messages, model_output=output, reward=1.0))
            self.commit(agent=self.agent, reset=True)
            raise TerminationEvent(TerminationReason.ENV_DONE)

    workflow = Asks(ScriptedEngine(["four"]))
    (path,) = (await run(workflow, question="2 + 2?")).trajectories
    assert (decode(path.steps[0].response_ids), path.reward) == ("four", 1.0)
    assert workflow.agent.trajectory.steps == []


async def test_simple_workflow_accepts_messages_and_names_missing_fields() -> None:
    workflow = SimpleWorkflow(ScriptedEngine(["four"]), reward_function=last_word)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
    assert (await run(workflow, messages=messages, answer="four")).is_correct
    episode = await run(workflow, riddle="?")
    assert "it needs one of messages, question, prompt, problem" in episode.info["error"]["message"]
    with pytest.raises(ConfigError, match="reward_function='f'"):
        SimpleWorkflow(reward_function="f")  # type: ignore[arg-type]


async def test_multi_turn_workflow_plays_to_the_end_and_is_reusable() -> None:
    workflow = MultiTurnWorkflow(ScriptedEngine(["on"]), agent_cls=Talker, env_cls=Countdown, max_steps=3)
    for start, reason, reward in [(2, "ENV_DONE", 1.0), (5, "MAX_TURNS_EXCEEDED", 0.0), (3, "ENV_DONE", 1.0)]:
        episode = await run(workflow, start=start)
        assert episode.termination_reason is TerminationReason[reason]
        (path,) = episode.trajectories
        assert (path.name, path.reward, len(path.steps)) == ("talker", reward, min(start, 3))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [1, 2])
def test_environments_that_are_not_thread_safe_share_one_thread_among_all_workflows(loop: int) -> None:
    class Unsafe(Countdown):
        def step(self, action: Any) -> Any:
            threads.add(threading.current_thread())
            return super().step(action)

        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return Unsafe(info["start"])

        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    async def run_many() -> None:
        args: dict[str, Any] = {"agent_cls": Talker, "env_cls": Unsafe}
        many = [MultiTurnWorkflow(ScriptedEngine(["on"]), **args) for _ in range(4)]
        found = await asyncio.gather(*(run(workflow, start=3) for workflow in many))
        assert all(episode.is_correct for episode in found)

    threads: set[threading.Thread] = set()
    for number in range(1, loop + 1):
        asyncio.run(run_many())
        assert len(threads) == number
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_class_given_by_a_short_name_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="agent_cls='math_agent'"):
        MultiTurnWorkflow(agent_cls="math_agent", env_cls=Countdown)  # type: ignore[arg-type]


async def test_truncated_answer_is_a_step() -> None:
    workflow = MultiTurnWorkflow(
        ScriptedEngine(["a long answer"]), agent_cls=Talker, env_cls=Countdown, max_response_length=4
    )
    episode = await run(workflow, start=2)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    (step,) = episode.trajectories[0].steps
    assert (decode(step.response_ids), step.reward) == ("a lo", 0.0)


async def test_single_turn_workflow_has_one_turn() -> None:
    workflow = SingleTurnWorkflow(ScriptedEngine(["on"]), agent_cls=Talker, env_cls=Countdown)
    assert len((await run(workflow, start=5)).trajectories[0].steps) == 1


async def test_cumulative_workflow_is_limited_by_its_tokens() -> None:
    workflow = CumulativeWorkflow(
        ScriptedEngine(["on"]), agent_cls=Talker, env_cls=Countdown, max_response_length=100, max_steps=50
    )
    episode = await run(workflow, start=50)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    steps = episode.trajectories[0].steps
    assert 1 < len(steps) < 10
    first, last = steps[0], steps[-1]
    assert len(last.prompt_ids) + len(last.response_ids) - len(first.prompt_ids) <= 100


async def test_cumulative_workflow_has_five_turns_by_default() -> None:
    workflow = CumulativeWorkflow(ScriptedEngine(["on"]), agent_cls=Talker, env_cls=Countdown)
    episode = await run(workflow, start=50)
    assert (len(episode.trajectories[0].steps), episode.termination_reason) == (5, TerminationReason.MAX_TURNS_EXCEEDED)


async def test_environment_error_is_attributed_to_it() -> None:
    class Broken(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Any:
            raise FileNotFoundError("map.txt")

    workflow = MultiTurnWorkflow(ScriptedEngine(["on"]), agent_cls=Talker, env_cls=Broken)
    episode = await run(workflow, start=1)
    assert episode.info["error"]["type"] == "EnvError"
    assert "Broken.from_dict raised FileNotFoundError: map.txt" in episode.info["error"]["message"]


def test_engine_may_be_missing() -> None:
    assert Scripted(rollout_engine=None, executor=None).rollout_engine is None
    assert issubclass(Talker, BaseAgent)
    assert Action("x").action == "x"
