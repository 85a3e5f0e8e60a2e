from typing import Any

import pytest

from rllm.capture import side_call, side_calls
from rllm.types import SIDE_CALL_KEY, Trace

TOOLS = [{"type": "function", "function": {"name": "f"}}]
ASKED = [{"role": "user", "content": "fix the bug"}]
TITLE_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "t", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}},
}


def trace(id: str, messages: list[dict[str, Any]], answer: str = "", **fields: Any) -> Trace:
    response = {"role": "assistant", "content": answer}
    return Trace(id=id, call_id=id, session_id="s", model="m", messages=messages, response=response, **fields)


@pytest.mark.parametrize(
    ("request_fields", "session_has_tools", "reason"),
    [
        ({}, False, None),
        ({}, True, "without tools"),
        ({"tools": []}, True, "without tools"),
        ({"tools": TOOLS}, True, None),
        ({"response_format": TITLE_SCHEMA}, False, "title"),
        ({"response_format": {"type": "json_object"}}, False, None),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, False, None),
        ({"response_format": "text"}, False, None),
    ],
)
def test_what_is_known_when_the_call_is_made(request_fields, session_has_tools, reason):
    assert side_call({"messages": ASKED, **request_fields}, session_has_tools=session_has_tools) == reason


def test_the_last_turn_of_a_task_may_be_without_tools():
    messages = [*ASKED, {"role": "assistant", "content": "done"}, {"role": "user", "content": "in a word?"}]
    assert side_call({"messages": messages}, session_has_tools=True) is None


def test_a_prompt_of_bare_ids_is_taken_for_a_turn_of_the_task():
    assert side_call({"messages": []}, session_has_tools=True) is None
    assert side_calls([trace("ids", [], "ok"), trace("main", ASKED, "I will", tools=TOOLS)]) == set()


def test_a_title_that_was_asked_for_first_is_told_by_what_follows():
    traces = [trace("title", ASKED, "Fixing"), trace("main", ASKED, "I will", tools=TOOLS)]
    assert side_calls(traces) == {"title"}


def test_a_plan_that_the_task_goes_on_from_belongs_to_it():
    planned = [*ASKED, {"role": "assistant", "content": "First read."}, {"role": "user", "content": "go"}]
    traces = [trace("plan", ASKED, "First read."), trace("main", planned, "ok", tools=TOOLS)]
    assert side_calls(traces) == set()


def test_a_plan_comes_back_without_the_white_space_around_it():
    planned = [*ASKED, {"role": "assistant", "content": "First read."}, {"role": "user", "content": "go"}]
    traces = [trace("plan", ASKED, "\n\nFirst read.\n"), trace("main", planned, "ok", tools=TOOLS)]
    assert side_calls(traces) == set()


def test_an_answer_without_a_text_belongs_to_the_task_if_its_tokens_are_gone_on_from():
    on = [*ASKED, {"role": "assistant", "content": ""}, {"role": "user", "content": "And what do you say?"}]
    traces = [trace("thought", ASKED), trace("main", on, "ok", tools=TOOLS, parent_id="thought")]
    assert side_calls(traces) == set()


def test_a_title_that_was_cut_off_before_it_said_anything_is_no_answer_of_the_task():
    called = [*ASKED, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "1"}]
    traces = [trace("title", ASKED), trace("main", ASKED, tools=TOOLS), trace("next", called, "done", tools=TOOLS)]
    assert side_calls(traces) == {"title"}


def test_a_title_that_was_asked_for_as_such_is_one_also_where_somebody_said_the_same():
    titled = trace("title", ASKED, "Fixing", metadata={SIDE_CALL_KEY: "title"})
    on = [*ASKED, {"role": "assistant", "content": "Fixing"}, {"role": "user", "content": "on"}]
    assert side_calls([titled, trace("main", on, "ok", tools=TOOLS)]) == {"title"}


def test_each_message_of_a_long_session_is_looked_at_a_few_times_only():
    num_reads = 0

    class Message(dict):
        def get(self, *args):
            nonlocal num_reads
            num_reads += 1
            return super().get(*args)

    messages = [Message(role="user", content="go")]
    traces = [trace("title", ASKED, "Fixing")]
    for turn in range(50):
        traces.append(trace(f"turn {turn}", list(messages), f"step {turn}", tools=TOOLS))
        messages += [Message(role="assistant", content=f"step {turn}"), Message(role="user", content="on")]
    assert side_calls(traces) == {"title"}
    assert num_reads <= 3 * sum(len(item.messages) for item in traces)


def test_where_all_calls_are_alike_none_is_beside_the_others():
    assert side_calls([trace("one", ASKED), trace("two", ASKED)]) == set()
    titles = [trace(name, ASKED, metadata={SIDE_CALL_KEY: "title"}) for name in ("one", "two")]
    assert side_calls(titles) == set(), "titles are the task"


def test_a_program_that_the_authors_code_started_is_not_the_authors():
    told = {"session_uids": ["ctx_1"], "of_program": True}
    traces = [trace("main", ASKED, tools=TOOLS, metadata=told), trace("title", ASKED, metadata=told)]
    assert side_calls(traces) == {"title"}


def test_what_the_authors_own_code_asks_is_of_the_task():
    own = {"session_uids": ["ctx_1"]}
    traces = [trace("main", ASKED, tools=TOOLS, metadata=own), trace("in a tool", ASKED, metadata=own)]
    assert side_calls(traces) == set()
    for asked in ({"messages": ASKED}, {"messages": ASKED, "response_format": TITLE_SCHEMA}):
        assert side_call(asked, session_has_tools=True, is_own=True) is None
