"""Answers recognized by their content, however clients write them back."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rllm.capture import Conversations, MessageDigests, PriorAnswer
from rllm.types import Message, Trace

USER: Message = {"role": "user", "content": "What is 6 x 7?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "mul", "arguments": '{"b":  7.0,"a":6}'}}
ANSWER: Message = {
    "role": "assistant",
    "content": "\n\nLet me compute. \n",
    "reasoning_content": "Six times seven.",
    "tool_calls": [CALL],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_1", "content": "42"}


def trace_of(messages: list[Message], response: Message, prompt_ids: list[int], id: str = "t1") -> Trace:
    return Trace(
        id=id,
        call_id=id,
        session_id="s",
        model="m",
        messages=messages,
        response=response,
        prompt_ids=prompt_ids,
        response_ids=[90, 91],
        logprobs=[-0.1, -0.2],
    )


def remember(known: Conversations, asked: MessageDigests, trace: Trace) -> None:
    known.add(known.prepare(asked, trace))


def after_one_answer(answer: Message = ANSWER, **options: Any) -> Conversations:
    known = Conversations(**options)
    first = trace_of([USER], answer, [1, 2, 3])
    remember(known, MessageDigests.of([USER], None), first)
    asked = MessageDigests.of([USER, answer, RESULT], None)
    assert known.missing_trace(asked) == "t1", "most calls are not continued, so tokens are not kept"
    known.provide_tokens(asked, first)
    assert known.missing_trace(asked) is None
    return known


def prior_after(known: Conversations, messages: list[Message]) -> PriorAnswer | None:
    return known.prior_answer(MessageDigests.of(messages, None, known))


def test_call_with_deleted_trace_is_not_continued() -> None:
    known = Conversations()
    remember(known, MessageDigests.of([USER], None), trace_of([USER], ANSWER, [1, 2, 3]))
    asked = MessageDigests.of([USER, ANSWER, RESULT], None)
    known.provide_tokens(asked, None)
    assert known.missing_trace(asked) is None
    assert known.prior_answer(asked) is None


def test_answer_added_meanwhile_does_not_get_other_tokens() -> None:
    known = Conversations()
    first, later = (trace_of([USER], ANSWER, prompt_ids, name) for prompt_ids, name in (([1], "t1"), ([2], "t2")))
    asked = MessageDigests.of([USER, ANSWER, RESULT], None)
    remember(known, MessageDigests.of([USER], None), first)
    assert known.missing_trace(asked) == "t1"
    remember(known, MessageDigests.of([USER], None), later)
    known.provide_tokens(asked, first)
    assert known.missing_trace(asked) == "t2"


def called(arguments: Any, **changes: Any) -> Message:
    return {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "mul", "arguments": arguments}}], **changes}


@pytest.mark.parametrize(
    "echo",
    [
        ANSWER,
        {key: value for key, value in ANSWER.items() if key != "reasoning_content"},
        called('{"b": 7, "a": 6}'),
        called('{"a":6,"b":7}', content="Let me compute."),
        called({"a": 6, "b": 7}),
        called(CALL["function"]["arguments"], content=[{"type": "text", "text": "Let me compute."}]),
        {**ANSWER, "refusal": None, "annotations": [], "name": "agent", "audio": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
    ],
    ids=[
        "verbatim",
        "no-reasoning",
        "json",
        "compact-stripped",
        "object",
        "parts",
        "more-fields",
        "null",
        "calls-only",
    ],
)
def test_answer_is_recognized_in_any_form(echo: Message) -> None:
    prior = prior_after(after_one_answer(), [USER, echo, RESULT])
    assert prior is not None
    assert (prior.trace_id, prior.num_messages, list(prior.token_ids)) == ("t1", 2, [1, 2, 3, 90, 91])


@pytest.mark.parametrize(
    "messages",
    [
        [{**USER, "content": "What is 6 x 8?"}, ANSWER, RESULT],
        [USER, {**ANSWER, "content": "I will not compute."}, RESULT],
        [USER, called('{"b": 8, "a": 6}'), RESULT],
        [{"role": "system", "content": "Be brief."}, USER, ANSWER, RESULT],
        [USER, {**ANSWER, "tool_calls": [{**CALL, "id": "call_2"}]}, RESULT],
        [USER, RESULT],
    ],
    ids=["other-question", "other-content", "other-arguments", "other-system", "other-call", "dropped"],
)
def test_different_history_is_not_continued(messages: list[Message]) -> None:
    assert prior_after(after_one_answer(), messages) is None


def test_other_tools_start_another_conversation() -> None:
    assert after_one_answer().prior_answer(MessageDigests.of([USER, ANSWER], [{"type": "function"}])) is None


def test_images_distinguish_conversations_and_cache_marks_do_not() -> None:
    def shown(name: str, **marks: Any) -> Message:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{name}"}, **marks}]}

    known = Conversations()
    remember(known, MessageDigests.of([shown("cat")], None), trace_of([shown("cat")], ANSWER, [1, 2, 3]))
    assert (
        known.missing_trace(
            MessageDigests.of([shown("cat", cache_control={"type": "ephemeral"}), ANSWER, RESULT], None)
        )
        == "t1"
    )
    assert known.missing_trace(MessageDigests.of([shown("dog"), ANSWER, RESULT], None)) is None


@pytest.mark.parametrize("echo", ["{}", '{"INVALID_JSON": "..."}', {}, '{"b": 7'])
def test_invalid_json_arguments_may_come_back_as_anything(echo: Any) -> None:
    known = after_one_answer(called('{"b": 7'))
    assert prior_after(known, [USER, called(echo), RESULT]) is not None


def test_litellm_placeholder_for_empty_content_matches_none() -> None:
    known = after_one_answer({**ANSWER, "content": None})
    remark = "[System: Empty message content sanitised to satisfy protocol]"
    assert prior_after(known, [USER, {**ANSWER, "content": remark}, RESULT]) is not None
    assert prior_after(known, [USER, {**ANSWER, "content": "I would rather add."}, RESULT]) is None


def test_answer_without_tool_calls_is_matched_by_content() -> None:
    known = after_one_answer({"role": "assistant", "content": "42"})
    assert prior_after(known, [USER, {"role": "assistant", "content": None}, USER]) is None


def test_longest_history_is_used_and_tokens_are_kept_once() -> None:
    known = after_one_answer()
    second = [USER, ANSWER, RESULT]
    remember(
        known,
        MessageDigests.of(second, None),
        trace_of(second, {"role": "assistant", "content": "42"}, [1, 2, 3, 90, 91, 5, 6], "t2"),
    )
    third = [*second, {"role": "assistant", "content": "42 "}, {"role": "user", "content": "Thanks."}]
    prior = prior_after(known, third)
    assert prior is not None
    assert (prior.trace_id, prior.num_messages) == ("t2", 4)
    assert list(prior.token_ids) == [1, 2, 3, 90, 91, 5, 6, 90, 91]
    calls = {call.trace_id: call for call in known._calls.values()}
    assert calls["t1"].tokens is calls["t2"].tokens, "each token is kept once"


@pytest.mark.parametrize(
    ("messages", "prompt_ids", "drift"),
    [
        ([USER], [1, 2, 3], None),
        ([USER, ANSWER, RESULT], [1, 2, 3, 90, 91, 5], None),
        ([USER, ANSWER, RESULT], [1, 2, 3, 80, 5], "reasoning"),
        ([USER, called('{"b": 7.0, "a": 6}', reasoning_content=""), RESULT], [1, 2, 3, 80, 5], "reasoning"),
        ([USER, called('{"b": 7.0, "a": 6}'), RESULT], [1, 2, 3, 80, 5], "tool_json"),
        ([USER, {**ANSWER, "content": "No."}, RESULT], [1, 2, 3, 80, 5], "edited"),
        ([USER, {**ANSWER, "content": None}, RESULT], [1, 2, 3, 80, 5], "edited"),
        ([USER, called('{"b": 8}'), RESULT], [1, 2, 3, 80, 5], "edited"),
        ([{"role": "user", "content": "An example"}, {"role": "assistant", "content": "shown"}, USER], [7, 8], None),
    ],
    ids=[
        "first",
        "exact",
        "reasoning",
        "left-out",
        "sent-back",
        "edited",
        "content-left-out",
        "edited-call",
        "few-shot",
    ],
)
def test_drift_has_its_reason(messages: list[Message], prompt_ids: list[int], drift: str | None) -> None:
    known = after_one_answer()
    assert known.drift_of(MessageDigests.of(messages, None, known), prompt_ids) == drift


SHOWN: list[Message] = [{"role": "user", "content": "An example"}, {"role": "assistant", "content": "shown"}]
REPLY: Message = {"role": "assistant", "content": "It is 42."}
MORE: Message = {"role": "user", "content": "And 7 x 7?"}


@pytest.mark.parametrize(
    ("messages", "drift"),
    [
        ([USER, ANSWER, RESULT, REPLY, MORE], None),
        ([USER, ANSWER, RESULT, {**REPLY, "content": "It is 43."}, MORE], "edited"),
        ([RESULT, REPLY, MORE], "edited"),
        ([{"role": "system", "content": "Be brief."}, USER, ANSWER, RESULT], "edited"),
        ([USER, ANSWER, MORE], None),
        ([*SHOWN, USER], None),
        ([*SHOWN, MORE], None),
    ],
    ids=["exact", "later-answer", "beginning-left-out", "another-beginning", "branch", "few-shot", "few-shot-again"],
)
def test_history_with_our_answers_counts_as_edited(messages: list[Message], drift: str | None) -> None:
    known = after_one_answer()
    for asked, prompt_ids in (([USER, ANSWER, RESULT], [1, 2, 3, 90, 91, 5]), ([*SHOWN, USER], [7, 8])):
        remember(known, MessageDigests.of(asked, None, known), trace_of(asked, REPLY, prompt_ids, "t2"))
    prompt_ids = [1, 2, 3, 90, 91, 5, 90, 91, 6] if messages[:2] == [USER, ANSWER] else [8]
    assert known.drift_of(MessageDigests.of(messages, None, known), prompt_ids) == drift
    assert known.drift_of(MessageDigests.of(messages, [CALL], known), prompt_ids) is None, (
        "other tools begin another conversation"
    )


@pytest.mark.parametrize(
    "changes", [{}, called('{"b": 7.0, "a": 6}'), {"content": None}], ids=["exact", "json", "bare"]
)
def test_edits_are_found_for_any_form_of_answer(changes: Message) -> None:
    known = after_one_answer()
    again: Message = {"role": "user", "content": "What is 6 x 7? Be brief."}
    assert known.drift_of(MessageDigests.of([again, ANSWER | changes, RESULT], None, known), [8]) is None
    system: Message = {"role": "system", "content": "Be brief."}
    assert known.drift_of(MessageDigests.of([system, USER, ANSWER | changes, RESULT], None, known), [8]) == "edited"


def test_edits_between_answers_are_found() -> None:
    known = Conversations()
    reminder: Message = {"role": "system", "content": "Be brief."}
    other: Message = {"role": "assistant", "content": "49"}
    for asked, answer in (([USER, reminder], REPLY), ([USER, REPLY, MORE, reminder], other)):
        remember(known, MessageDigests.of(asked, None, known), trace_of(asked, answer, [1, 2, 3]))
    on = [MORE, reminder]
    assert known.drift_of(MessageDigests.of([USER, REPLY, MORE, other, *on], None, known), [8]) == "edited"
    assert known.drift_of(MessageDigests.of([USER, REPLY, RESULT, called("{}"), *on], None, known), [8]) is None
    assert known.drift_of(MessageDigests.of([RESULT, REPLY, RESULT, other, *on], None, known), [8]) is None


def test_answer_ended_by_a_stop_string_may_be_extended() -> None:
    answer = {"role": "assistant", "content": "<code>\nlook()\n"}
    known = Conversations()
    remember(
        known, MessageDigests.of([USER], None), replace(trace_of([USER], answer, [1]), sampling={"stop": ["</code>"]})
    )
    asked = MessageDigests.of([USER, {**answer, "content": "<code>\nlook()\n</code>\nObserved: 42"}], None)
    known.provide_tokens(asked, trace_of([USER], answer, [1]))
    prior = known.prior_answer(asked)
    assert prior is not None
    assert (prior.num_messages, list(prior.token_ids)) == (2, [1, 90, 91])
    assert prior.appended_text == "</code>\nObserved: 42"
    assert known.drift_of(asked, [1, 90, 91, 5]) is None
    assert known.drift_of(asked, [1, 80]) == "edited"
    assert prior_after(known, [USER, {**answer, "content": "<code>\nleave()\n</code>"}]) is None
    assert prior_after(known, [USER, {**answer, "tool_calls": [CALL]}, RESULT]) is None, "no tool call was sampled"
    assert prior_after(known, [RESULT, {**answer, "content": "<code>\nlook()\n</code>"}]) is None


def test_complete_answer_may_not_be_extended() -> None:
    more = {**ANSWER, "content": "\n\nLet me compute. \n Or not."}
    assert prior_after(after_one_answer(), [USER, more, RESULT]) is None


def test_drift_without_reasoning_has_its_reason() -> None:
    plain = {key: value for key, value in ANSWER.items() if key != "reasoning_content"}
    known = after_one_answer(plain)
    rewritten = {**plain, "tool_calls": called('{"b": 7, "a": 6}')["tool_calls"]}
    assert known.drift_of(MessageDigests.of([USER, rewritten, RESULT], None, known), [1, 2, 3, 80]) == "tool_json"
    assert known.drift_of(MessageDigests.of([USER, plain, RESULT], None), [1, 2, 3, 80]) == "template"


def test_deliberately_removed_reasoning_is_respected() -> None:
    known = after_one_answer(match_reasoning=True)
    without = {key: value for key, value in ANSWER.items() if key != "reasoning_content"}
    assert prior_after(known, [USER, ANSWER, RESULT]) is not None
    assert prior_after(known, [USER, without, RESULT]) is None


@pytest.mark.parametrize(
    ("thought", "from_trace"), [("By adding.", "t1"), (" By guessing.\n", "t2"), ("", "t2"), ("Otherwise.", "t2")]
)
def test_reasoning_distinguishes_equal_answers(thought: str, from_trace: str) -> None:
    known = Conversations()
    answers = {"t1": {"reasoning": "By adding."}, "t2": {"reasoning_content": "By guessing."}}
    traces = {
        name: trace_of([USER], {"role": "assistant", "content": "42", **how}, [1, number], name)
        for number, (name, how) in enumerate(answers.items())
    }
    for trace in traces.values():
        remember(known, MessageDigests.of([USER], None), trace)
    answer = {"role": "assistant", "content": "42", "reasoning_content": thought}
    asked = MessageDigests.of([USER, answer, {"role": "user", "content": "Are you sure?"}], None)
    assert known.missing_trace(asked) == from_trace
    known.provide_tokens(asked, traces[from_trace])
    prior = known.prior_answer(asked)
    assert prior is not None
    assert prior.trace_id == from_trace


def test_invalid_messages_are_not_recognized() -> None:
    odd: Any = [
        "text",
        {"role": "assistant", "tool_calls": ["x", {"function": None}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "user", "content": ["a"]},
    ]
    assert prior_after(after_one_answer(), odd) is None


def test_turn_of_a_long_conversation_digests_only_its_own_messages() -> None:
    known = Conversations()
    messages, ids = [USER], [1]
    for turn in range(200):
        asked = MessageDigests.of(messages, None, known, json.dumps(messages).encode())
        assert asked.num_known == (len(messages) - 2 if turn > 1 else 0)
        prior = known.prior_answer(asked)
        assert prior is None or list(prior.token_ids) == ids[:-1]
        trace = trace_of(messages, {"role": "assistant", "content": f"{turn}"}, ids, f"t{turn}")
        remember(known, asked, trace)
        messages, ids = [*messages, trace.response, RESULT], [*ids, *trace.response_ids, 100 + turn]
        if turn == 0:
            known.provide_tokens(MessageDigests.of(messages, None, known), trace)


@pytest.mark.slow
def test_kept_digests_equal_computed_ones() -> None:
    """Conversations that take turns and branch, with edits, lost messages, other tools and rewritten arguments."""
    random, known, ended, num_reused = Random(0), Conversations(), [[USER]], 0
    for number in range(400):
        messages = deepcopy(random.choice(ended[-6:]))
        changed = messages[random.randrange(len(messages))]
        match random.randrange(8):
            case 0:
                changed["content"] = "edited"
            case 1:
                messages.remove(changed)
            case 2 if "tool_calls" in changed:
                changed["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": 6, "b": 7}, indent=1)
        messages.append({"role": "user", "content": f"{random.randrange(3)}"})
        tools = [CALL] if random.random() < 0.1 else None
        asked = MessageDigests.of(messages, tools, known, json.dumps(messages).encode())
        computed = MessageDigests.of(messages, tools, known)
        assert asked[1:4] == computed[1:4], number
        num_reused += asked.num_known > 0
        response = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": f"call_{number}"}]}
        remember(known, asked, trace_of(messages, response, [number], f"t{number}"))
        ended.append([*messages, response])
    assert num_reused > 100
