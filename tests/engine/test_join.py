"""Assignment of tokens to steps, on traces made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rllm.engine.join import awaited_ids, complete
from rllm.engine.request import RolloutRequest
from rllm.errors import CaptureError
from rllm.types import UNSCORED, Episode, Step, Trace, Trajectory

YES = {"role": "assistant", "content": "yes"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def trace(number: int, messages: list[dict[str, Any]], **response: Any) -> Trace:
    return Trace(
        id=f"call-{number}",
        call_id=f"call-{number}",
        session_id="s",
        model="m",
        messages=messages,
        response={**YES, **response},
        prompt_ids=[1],
        response_ids=[number],
        logprobs=[-1.0],
    )


def join(path: Trajectory, *traces: Trace, **options: bool) -> Episode:
    return complete(Episode(trajectories=[path]), RolloutRequest(task={}, task_id="t", **options), traces)


def joined(steps: list[Step], *traces: Trace) -> list[list[int]]:
    join(Trajectory(steps=steps), *traces)
    return [step.response_ids for step in steps]


def step_of(*messages: dict[str, Any], **facts: Any) -> Step:
    return Step(chat_completions=list(messages), **facts)


def test_last_turn_is_not_joined_with_an_earlier_equal_answer() -> None:
    first, second = trace(1, [user("a")]), trace(2, [user("a"), YES, user("b")])
    later = step_of(user("a"), YES, user("b"), YES)
    assert joined([later], first, second) == [[2]]
    assert joined([step_of(user("a"), YES, user("b"), YES), step_of(user("a"), YES)], first, second) == [[2], [1]]


def test_messages_without_the_answer_are_joined_by_the_answer() -> None:
    assert joined([step_of(user("b"), model_response="yes")], trace(1, [user("a")]), trace(2, [user("b")])) == [[2]]


def test_equal_calls_are_joined_in_call_order() -> None:
    steps = [step_of(user("a"), YES), step_of(user("a"), YES)]
    assert joined(steps, trace(1, [user("a")]), trace(2, [user("a")])) == [[1], [2]]


def test_call_named_by_a_step_is_not_joined_with_another() -> None:
    steps = [step_of(user("a"), YES), step_of(user("a"), YES, id="call-1")]
    assert joined(steps, trace(1, [user("a")]), trace(2, [user("a")])) == [[2], [1]]


def test_answer_may_consist_of_tool_calls() -> None:
    answer = {"content": None, "tool_calls": [{"id": "1"}]}
    traces = [trace(1, [user("a")], **answer), trace(2, [user("a")], content=None)]
    assert joined([step_of(user("a"), {"role": "assistant", **answer})], *traces) == [[1]]


@pytest.mark.parametrize("asked", [[], [user("a")]])
def test_step_with_only_the_answer_is_joined(asked: list[dict[str, Any]]) -> None:
    assert joined([step_of(*asked, model_response="yes")], trace(1, [user("a")])) == [[1]]


@pytest.mark.parametrize(
    ("step", "traces"),
    [
        (Step(model_response="yes"), [trace(1, [user("a")]), trace(2, [user("b")])]),
        (step_of(user("a"), YES), [trace(1, [user("a")], reasoning_content="x"), trace(2, [user("a")])]),
        (step_of(user("a"), YES), [trace(1, [user("a")], tool_calls=[{"id": "1"}]), trace(2, [user("a")])]),
        (step_of(user("edited"), YES), [trace(1, [user("a")])]),
        (step_of(user("a"), YES, user("more")), [trace(1, [user("a")])]),
        (Step(prompt_ids=[1], response_ids=[9], logprobs=[-1.0]), [trace(1, [user("a")])]),
    ],
)
def test_ambiguous_steps_are_rejected(step: Step, traces: list[Trace]) -> None:
    with pytest.raises(CaptureError, match="is not a call that the gateway captured in this session"):
        joined([step], *traces)


def test_tool_calls_distinguish_answers_with_the_same_text() -> None:
    calls = [[{"id": str(number)}] for number in range(2)]
    traces = [trace(number, [user("a")], tool_calls=calls[number]) for number in range(2)]
    steps = [step_of(user("a"), {**YES, "tool_calls": calls[number]}) for number in (1, 0)]
    assert joined(steps, *traces) == [[1], [0]]


@pytest.mark.parametrize("rewards", [(0.25, 0.5), (0.25, UNSCORED)])
def test_reward_of_a_call_without_usable_tokens_is_kept(rewards: tuple[float, float]) -> None:
    path = Trajectory(steps=[Step(id=f"call-{number}", reward=reward) for number, reward in enumerate(rewards)])
    earned = path.final_reward()
    join(path, replace(trace(0, []), error="cut off"), trace(1, []))
    assert [step.response_ids for step in path.steps] == [[1]]
    assert path.final_reward() == earned
    assert path.info["num_unusable_calls"] == 1


def test_traces_awaited_by_the_join() -> None:
    complete_step = Step(id="call-3", prompt_ids=[1], response_ids=[9], logprobs=[-1.0])
    no_prompt = Step(id="call-4", response_ids=[9], logprobs=[-1.0])
    steps = [step_of(user("a"), YES, id="call-1"), step_of(user("a"), YES), Step(id="call-2"), complete_step, no_prompt]
    episode = Episode(trajectories=[Trajectory(steps=steps)])
    attempt = RolloutRequest(task={}, task_id="t")
    assert awaited_ids(episode, attempt, [trace(1, [user("a")])]) == {"call-1", "call-2", "call-4"}
    assert awaited_ids(episode, replace(attempt, trainable=False), []) == set()


def test_foreign_tokens_are_accepted_if_not_trained_on() -> None:
    foreign = Step(prompt_ids=[1], response_ids=[9], logprobs=[-1.0])
    join(Trajectory(steps=[foreign], trainable=False))
    assert foreign.response_ids == [9]


def test_duplicate_step_counts_once() -> None:
    step = Step(id="call-1", reward=0.5)
    path = Trajectory(name="solver", steps=[step, step])
    again = Trajectory(name="judge", steps=[Step(id="call-1")], reward=0.0)
    episode = Episode(trajectories=[path, again, path])
    complete(episode, RolloutRequest(task={}, task_id="t"), [trace(1, [user("a")])])
    assert [item.name for item in episode.trajectories] == ["solver", "judge"]
    assert (len(path.steps), path.final_reward()) == (1, 0.5)
    assert "'solver' has the same step more than once" in episode.info["warnings"][0]
    assert "the same trajectory was given more than once" in episode.info["warnings"][1]


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def with_title_call() -> tuple[Trace, Trace]:
    title, main = trace(1, [user("fix it")], content="Fixing it"), trace(2, [user("fix it")], content="I will")
    return title, replace(main, tools=TOOLS)


@pytest.mark.parametrize(("side_calls", "steps", "num_aside"), [(False, [[2]], 1), (True, [[1], [2]], None)])
def test_title_call_is_not_a_step_unless_requested(
    side_calls: bool, steps: list[list[int]], num_aside: int | None
) -> None:
    path = Trajectory()
    join(path, *with_title_call(), side_calls=side_calls)
    assert [step.response_ids for step in path.steps] == steps
    assert path.info.get("num_side_calls") == num_aside


def test_summary_that_replaces_the_history_is_a_step() -> None:
    summary = trace(
        3, [user("Summarize: fix it")], content="It was about a parser that fails on quoted fields, and its test."
    )
    after = replace(trace(4, [user(f"Summary: {summary.response['content']}")]), tools=TOOLS)
    path = Trajectory()
    join(path, *with_title_call(), summary, after)
    assert [step.response_ids for step in path.steps] == [[2], [3], [4]]
    assert path.info["num_side_calls"] == 1


def test_side_call_named_by_a_step_is_a_step() -> None:
    assert joined([Step(id="call-1"), Step(id="call-2")], *with_title_call()) == [[1], [2]]
