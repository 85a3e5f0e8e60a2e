"""Branches of one conversation whose tool calls have the same ids, as some servers give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import Conversations, MessageDigests, PriorAnswer
from rllm.types import Message, Trace

USER: Message = {"role": "user", "content": "Which pets?"}
RESULT: Message = {"role": "tool", "tool_call_id": "functions.search:0", "content": "42"}
DONE: Message = {"role": "assistant", "content": "Done."}
Branches: TypeAlias = tuple[Conversations, dict[str, Trace]]


def called(arguments: Any, *, name: str = "search", content: str | None = None) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "functions.search:0", "type": "function", "function": function}],
    }


def answer(branches: Branches, messages: Sequence[Message], response: Message, known_ids: Sequence[int] = ()) -> Trace:
    """Return the answer to these messages, with new tokens after the known ones."""
    known, traces = branches
    number = 10 * (len(traces) + 1)
    trace = Trace(
        id=f"t{len(traces)}",
        call_id="c",
        session_id="s",
        model="m",
        messages=list(messages),
        response=response,
        prompt_ids=[*(known_ids or [1]), number],
        response_ids=[number + 1],
        logprobs=[-0.1],
    )
    known.add(known.prepare(MessageDigests.of(messages, None, known), trace))
    traces[trace.id] = trace
    return trace


def prior_of(branches: Branches, messages: Sequence[Message]) -> PriorAnswer | None:
    known, traces = branches
    text = MessageDigests.of(messages, None, known)
    if missing := known.missing_trace(text):
        known.provide_tokens(text, traces[missing])
    return known.prior_answer(text)


def branches_of(*responses: Message) -> Branches:
    branches: Branches = (Conversations(), {})
    for response in responses:
        answer(branches, [USER], response)
    return branches


def continued(branches: Branches, *messages: Message) -> str | None:
    prior = prior_of(branches, [USER, *messages])
    return prior and prior.trace_id


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (called('{"q": "cats"}'), called('{"q": "dogs"}')),
        (called('{"q": "cats"}'), called('{"q": "do')),
        (called('{"q": "ca'), called('{"q": "do')),
        (called('{"q": "cats"}'), called('{"q":"cats"}')),
        (called("{}"), called("{}", name="look")),
        (called("{}"), called("{}", content="Let me see.")),
    ],
    ids=["arguments", "cut-off", "both-cut-off", "spaces", "name", "content"],
)
def test_returned_branch_is_continued(first: Message, second: Message) -> None:
    for branches in (branches_of(first, second), branches_of(second, first)):
        for name, trace in branches[1].items():
            assert continued(branches, trace.response, RESULT) == name


@pytest.mark.parametrize(
    ("echo", "name"),
    [('{"q":"cats"}', "t0"), ({"q": "dogs"}, "t1"), ("{}", "t2"), ({"q": "birds"}, "t2"), ('{"q": "bi', "t2")],
)
def test_branch_with_reformatted_arguments_is_continued(echo: Any, name: str) -> None:
    branches = branches_of(called('{"q": "cats"}'), called('{"q": "dogs"}'), called('{"q": "bi'))
    assert continued(branches, called(echo), RESULT) == name


def test_ambiguous_branch_is_not_continued() -> None:
    branches = branches_of(called('{"q": "ca'), called('{"q": "do'))
    assert continued(branches, called("{}"), RESULT) is None


def test_latest_of_the_answers_equal_as_json_is_continued() -> None:
    cats = [called('{"q": "cats"}'), called('{"q":"cats"}'), called('{"q": "cats"}')]
    assert continued(branches_of(*cats), called('{ "q": "cats" }'), RESULT) == "t2"
    assert continued(branches_of(*cats), called({"q": "cats"}), RESULT) == "t2"


def test_branches_are_distinguished_by_an_earlier_call() -> None:
    branches = branches_of(called('{"q": "cats"}'), called('{"q": "dogs"}'))
    for trace in list(branches[1].values()):
        answer(branches, [USER, trace.response, RESULT], DONE, [*trace.prompt_ids, *trace.response_ids])
    assert continued(branches, called('{"q": "cats"}'), RESULT, DONE, USER) == "t2"
    assert continued(branches, called('{"q": "dogs"}'), RESULT, DONE, USER) == "t3"
    assert continued(branches, called('{"q": "birds"}'), RESULT, DONE, USER) is None


def test_requests_may_reformat_an_earlier_call() -> None:
    branches = branches_of(called('{"q": "cats", "n":  7}'))
    answer(branches, [USER, called({"n": 7.0, "q": "cats"}), RESULT], DONE)
    assert continued(branches, called('{"q":"cats","n":7}'), RESULT, DONE, USER) == "t1"


def test_size_of_branches_is_the_sum_of_their_sizes() -> None:
    known, _ = branches_of(*(called(json.dumps({"q": number})) for number in range(10)))
    one, _ = branches_of(called('{"q": 0}'))
    assert known.num_bytes == pytest.approx(10 * one.num_bytes)


def verbatim(message: Message) -> Message:
    return message


def compact(message: Message) -> Message:
    """Return the call as written by clients that keep arguments as objects."""
    if not message.get("tool_calls"):
        return message
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    return called(json.dumps(arguments, separators=(",", ":")), content=message["content"])


ANSWERS = [
    DONE,
    {"role": "assistant", "content": "Well."},
    *(called(arguments) for arguments in ('{"a": 1}', '{"a": 2}', '{"b": 1, "a": 1}')),
    called('{"a": 2}', content="Let me see."),
]
CUT_OFF = [called(arguments) for arguments in ('{"a":1}', '{"a":', '{"b"')]
TURNS = st.tuples(st.integers(0, 30), st.sampled_from([USER, RESULT]), st.integers(0, 30))


@pytest.mark.parametrize(("write_back", "answers"), [(verbatim, [*ANSWERS, *CUT_OFF]), (compact, ANSWERS)])
@given(turns=st.lists(TURNS, min_size=2, max_size=25))
def test_any_branch_is_continued_exactly(
    write_back: Callable[[Message], Message], answers: list[Message], turns: list[tuple[int, Message, int]]
) -> None:
    """Each turn continues some earlier answer, or starts again; the messages decide which."""
    branches: Branches = (Conversations(), {})
    latest: dict[str, Trace] = {}
    for place, message, number in turns:
        traces = list(branches[1].values())
        base = traces[place] if place < len(traces) else None
        history = [] if base is None else [*base.messages, write_back(base.response)]
        prior, expected = prior_of(branches, [*history, message]), latest.get(json.dumps(history))
        assert (prior and [*prior.token_ids]) == (expected and [*expected.prompt_ids, *expected.response_ids])
        response = answers[number % len(answers)]
        given = answer(branches, [*history, message], response, prior.token_ids if prior else ())
        latest[json.dumps([*history, message, write_back(response)])] = given
