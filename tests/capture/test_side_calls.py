import html
import json
import textwrap
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
def test_side_calls_recognized_at_request_time(request_fields, session_has_tools, reason):
    assert side_call({"messages": ASKED, **request_fields}, session_has_tools=session_has_tools) == reason


def test_last_turn_of_a_task_may_have_no_tools():
    messages = [*ASKED, {"role": "assistant", "content": "done"}, {"role": "user", "content": "in a word?"}]
    assert side_call({"messages": messages}, session_has_tools=True) is None


def test_prompt_of_bare_ids_counts_as_a_turn_of_the_task():
    assert side_call({"messages": []}, session_has_tools=True) is None
    assert set(side_calls([trace("ids", [], "ok"), trace("main", ASKED, "I will", tools=TOOLS)])) == set()


def test_title_requested_first_is_recognized_by_later_calls():
    traces = [trace("title", ASKED, "Fixing"), trace("main", ASKED, "I will", tools=TOOLS)]
    assert set(side_calls(traces)) == {"title"}


def test_continued_plan_belongs_to_the_task():
    planned = [*ASKED, {"role": "assistant", "content": "First read."}, {"role": "user", "content": "go"}]
    traces = [trace("plan", ASKED, "First read."), trace("main", planned, "ok", tools=TOOLS)]
    assert set(side_calls(traces)) == set()


def test_plan_is_recognized_without_surrounding_whitespace():
    planned = [*ASKED, {"role": "assistant", "content": "First read."}, {"role": "user", "content": "go"}]
    traces = [trace("plan", ASKED, "\n\nFirst read.\n"), trace("main", planned, "ok", tools=TOOLS)]
    assert set(side_calls(traces)) == set()


def test_continued_answer_without_text_belongs_to_the_task():
    on = [*ASKED, {"role": "assistant", "content": ""}, {"role": "user", "content": "And what do you say?"}]
    traces = [trace("thought", ASKED), trace("main", on, "ok", tools=TOOLS, parent_id="thought")]
    assert set(side_calls(traces)) == set()


def test_empty_title_is_a_side_call():
    called = [*ASKED, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "1"}]
    traces = [trace("title", ASKED), trace("main", ASKED, tools=TOOLS), trace("next", called, "done", tools=TOOLS)]
    assert set(side_calls(traces)) == {"title"}


def test_title_belongs_to_the_task_only_if_quoted():
    titled = trace("title", ASKED, '{"title": "Fixing the old parser"}', metadata={SIDE_CALL_KEY: "title"})
    assert side_calls([titled, trace("main", ASKED, "ok", tools=TOOLS)]) == {"title": "title"}
    headed = [{"role": "user", "content": 'Write the text for "Fixing the old parser".'}]
    assert side_calls([titled, trace("main", headed, "ok", tools=TOOLS)]) == {}


SUMMARY = """1. Primary request: the user wants the parser to accept "quoted" fields, é included.
2. Files read: src/parser.py, where `split(",")` is called on each line.
3. Errors and fixes: the first try broke empty fields; a test for these was added.
4. Next step: run the tests of the reader, and then write the changelog."""
TRANSCRIPT = "Summarize this conversation.\n[user] fix the bug\n[tool] def read(line): return line.split(',')"
PLAN = "Read the parser first, then write a failing test, and only then change the code."
LONG_LINE = " ".join(
    f"The {word} file holds the settings of one of the servers." for word in "first second third".split()
)


NOTES = """- Goal: accept quoted fields in the reader
- Done: a failing test of empty fields
- Found: the split in src/parser.py
- Next: change it and run the tests"""


def tagged(notes: str) -> str:
    lines = [line.removeprefix("- ").partition(": ") for line in notes.splitlines()]
    return "\n".join(f"<{label.lower()}>{text}</{label.lower()}>" for label, _, text in lines)


def numbered(notes: str) -> str:
    return "\n".join(f"{n}. {line.removeprefix('- ')}" for n, line in enumerate(notes.splitlines(), 1))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(
            f"<analysis>\nLet me go through it.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>",
            user(f"This session is being continued from a previous conversation.\nSummary:\n{SUMMARY}\nGo on."),
            id="Claude Code compacts",
        ),
        pytest.param(
            SUMMARY,
            user([{"type": "text", "text": f"Another model has begun to solve this; its summary:\n{SUMMARY}"}]),
            id="Codex compacts",
        ),
        pytest.param(f"\n{SUMMARY}\n", {"role": "assistant", "content": SUMMARY}, id="OpenCode compacts"),
        pytest.param(
            f"<think>What matters?</think>\n{SUMMARY}",
            {"role": "system", "content": f"You fix bugs.\nSummary of the conversation so far: {SUMMARY}"},
            id="LangGraph's SummarizationNode",
        ),
        pytest.param(
            SUMMARY, {"role": "assistant", "content": f"What I did so far: {SUMMARY}"}, id="history as an assistant"
        ),
        pytest.param(
            SUMMARY, tool([{"type": "text", "text": SUMMARY}, {"type": "text", "text": "agent 7"}]), id="sub-agent"
        ),
        pytest.param("4", tool("4"), id="sub-agent with a short answer"),
        pytest.param("It is 4.", tool([{"type": "text", "text": "It is 4."}]), id="sub-agent with a short part"),
        pytest.param(
            SUMMARY, tool([{"type": "tool_result", "content": [{"type": "text", "text": SUMMARY}]}]), id="nested parts"
        ),
        pytest.param(SUMMARY, tool(json.dumps({"result": SUMMARY})), id="JSON"),
        pytest.param(SUMMARY, tool(json.dumps([{"text": json.dumps({"result": SUMMARY})}])), id="JSON inside of JSON"),
        pytest.param(
            "It is in Bern, at home.", tool(json.dumps({"result": "It is in Bern, at home."})), id="short JSON"
        ),
        pytest.param(SUMMARY, tool(f"<result>{html.escape(SUMMARY)}</result>"), id="XML"),
        pytest.param(
            PLAN, user(f"Your plan:\n\n> {textwrap.fill(PLAN, 30)}\n\nBegin."), id="plan in a worker's prompt"
        ),
        pytest.param("Read, test, change.", user("Plan: Read, test, change.\nBegin."), id="short plan with a label"),
        pytest.param(
            "- read all of it\n- test it", user("Do this:\n  1. read all of it\n  2. test it"), id="short lines"
        ),
        pytest.param(json.dumps({"plan": PLAN}), user(f"Follow the plan. {PLAN} Begin."), id="plan taken out of JSON"),
        pytest.param(f'```json\n{{"plan": "{PLAN}"}}\n```', user(f"Follow: {PLAN}"), id="plan taken out of a block"),
        pytest.param(json.dumps({"steps": [PLAN]}), user(json.dumps({"steps": [PLAN]}, indent=2)), id="JSON indented"),
        pytest.param(NOTES, user("<memory>\n" + tagged(NOTES) + "\n</memory>"), id="lines in tags"),
        pytest.param(NOTES, user("So far:\n" + numbered(NOTES)), id="numbered lines"),
        pytest.param(f"<notes>{tagged(NOTES)}</notes>", user(NOTES.replace("- ", "## ")), id="tags to Markdown"),
        pytest.param(NOTES, user(numbered(NOTES).rpartition("\n")[0] + "\n[3 more lines]"), id="numbered and cut"),
        pytest.param(LONG_LINE, tool(LONG_LINE[:120] + "... [cut]"), id="cut at its end"),
        pytest.param(LONG_LINE, tool("[cut] ..." + LONG_LINE[-120:]), id="cut at its beginning"),
        pytest.param(
            "読み取り機が引用符付きの欄を受け付けるようにする。" * 2,
            user("要約：" + "読み取り機が引用符付きの欄を受け付けるようにする。" * 2),
            id="Japanese",
        ),
    ],
)
def test_quoted_answer_belongs_to_the_task(answer, message):
    before = trace("before", ASKED, "I will", tools=TOOLS)
    compacted = trace("compacted", [user(TRANSCRIPT)], answer)
    title = trace("title", ASKED, "Fix the bug of the reader")
    after = trace("after", [user("fix the bug"), message], "ok", tools=TOOLS)
    assert side_calls([before, title, compacted, after]) == {"title": "without tools"}
    assert "compacted" in side_calls([before, title, compacted]), "no later call quotes it"


@pytest.mark.parametrize(
    ("prompt", "answer", "later"),
    [
        pytest.param("Is this a new topic?", '{"isNewTopic": true, "title": "Parser"}', "Parser", id="topic"),
        pytest.param("quota", "I", "I am here", id="quota probe"),
        pytest.param("Count the tokens of this.", "4", "2 + 2\n4\n", id="short text on a line"),
        pytest.param("Title of: fix the bug of the reader", "Fix the bug of the reader", "other", id="title"),
        pytest.param(
            "Title of: the old reader", "the old reader", "the old reader", id="title that repeats the question"
        ),
        pytest.param(
            f"Quote the text: {LONG_LINE}", LONG_LINE, f"As before: {LONG_LINE}", id="quotation of its prompt"
        ),
        pytest.param(
            "Which command is it?\nnpm run build --all", "npm run build", "> npm run build\n> done", id="command"
        ),
        pytest.param("Is this safe?", "", "", id="nothing"),
        pytest.param("Is this safe?", "...", "...and on", id="no letters"),
    ],
)
def test_answer_that_is_never_quoted_is_a_side_call(prompt, answer, later):
    main = trace("main", ASKED, "I will", tools=TOOLS)
    on = [*ASKED, {"role": "assistant", "content": "I will"}, user(later), tool(later + " more")]
    traces = [main, trace("beside", [user(prompt)], answer), trace("on", on, "ok", tools=TOOLS)]
    assert side_calls(traces) == {"beside": "without tools"}


def test_message_of_an_earlier_call_is_not_a_quotation():
    shown = [user(f"Known: {PLAN}")]
    traces = [
        trace("main", shown, "ok", tools=TOOLS),
        trace("beside", ASKED, PLAN),
        trace("on", shown, "", tools=TOOLS),
    ]
    assert set(side_calls(traces)) == {"beside"}


def test_answers_of_the_model_are_not_quotations():
    on = [*ASKED, {"role": "assistant", "content": f"I will. {PLAN}"}, user("go")]
    traces = [
        trace("guess of what is next", ASKED, PLAN),
        trace("main", ASKED, f"I will. {PLAN}", tools=TOOLS),
        trace("on", on, "ok", tools=TOOLS),
    ]
    assert set(side_calls(traces)) == {"guess of what is next"}


def test_answer_quoted_only_by_side_calls_is_a_side_call():
    chunks = [trace(f"chunk {n}", [user(f"Summarize part {n}")], f"Part {n} is this. {PLAN}") for n in range(2)]
    both = trace("whole", [user("\n".join(f"Part {n} is this. {PLAN}" for n in range(2)))], SUMMARY)
    main, after = trace("main", ASKED, "ok", tools=TOOLS), trace("after", [user(SUMMARY)], "ok", tools=TOOLS)
    assert set(side_calls([main, *chunks, both])) == {"chunk 0", "chunk 1", "whole"}
    assert side_calls([main, *chunks, both, after]) == {}


def test_summary_that_repeats_the_last_one_belongs_to_the_task():
    after = [user(f"So far: {SUMMARY}")]
    traces = [
        trace("summary", [user(TRANSCRIPT)], SUMMARY),
        trace("main", after, "ok", tools=TOOLS),
        trace("again", [user(f"Summarize: {after}")], SUMMARY),
        trace("on", after, "ok", tools=TOOLS),
        trace("title", ASKED, "Parser"),
    ]
    assert side_calls(traces) == {"title": "without tools"}


def test_only_quoted_answers_of_one_prompt_belong_to_the_task():
    answers = [
        "Use a regular expression for the fields.",
        "Write the reader by hand, field by field.",
        "Use the csv module.",
    ]
    drafts = [trace(f"draft {n}", ASKED, answer) for n, answer in enumerate(answers)]
    chosen = trace("main", [user(f"Do this: {answers[1]}")], "ok", tools=TOOLS)
    assert set(side_calls([*drafts, chosen])) == {"draft 0", "draft 2"}
    judge = trace("judge", [user("Which is best?\n" + "\n".join(answers))], "The second, since it needs nothing else.")
    found = trace("main", [user(f"The second, since it needs nothing else.\n{answers[1]}")], "ok", tools=TOOLS)
    assert side_calls([*drafts, judge, found]) == {}


FOUND = "The reader of quoted fields is in src/parser.py, and it drops the last field of each line."


@pytest.mark.parametrize(
    ("found", "prompt"),
    [
        pytest.param({"role": "assistant", "content": FOUND}, f"Findings:\n{FOUND}\nWrite the report.", id="answer"),
        pytest.param(tool(FOUND), f"Question: fix the bug\nResults: {FOUND}\nAnswer it.", id="result of a tool"),
        pytest.param(tool(json.dumps({"text": FOUND})), [{"type": "text", "text": f"Use: {FOUND}"}], id="part"),
    ],
)
@pytest.mark.parametrize("answer", ["4", "The last field of each line is dropped.", SUMMARY])
def test_final_summary_of_the_task_belongs_to_it(found, prompt, answer):
    answers = FOUND if found["role"] == "assistant" else ""
    main = trace("main", ASKED, answers, tools=TOOLS)
    on = trace(
        "on", [*ASKED, {"role": "assistant", "content": answers}, *([] if answers else [found])], "", tools=TOOLS
    )
    title = trace("title", [user("Title of: fix the bug")], "Bug of the reader")
    final = trace("final", [user(prompt)], answer)
    assert set(side_calls([title, main, on, final])) == {"title"}
    assert set(side_calls([main, on, final, title])) == {"title"}
    after = trace("after", ASKED, "ok", tools=TOOLS)
    assert set(side_calls([main, on, trace("topic", [user(prompt)], "parser"), after])) == {"topic"}, (
        "a later call of the task follows"
    )
    titled = trace("titled", [user(prompt)], answer, metadata={SIDE_CALL_KEY: "title"})
    assert set(side_calls([main, on, titled])) == {"titled"}


def test_calls_are_compared_by_start_time():
    summary = trace("summary", [user(TRANSCRIPT)], SUMMARY, started_at=1.0)
    after = trace("after", [user(SUMMARY)], "ok", tools=TOOLS, started_at=2.0)
    assert side_calls([after, summary]) == {}


def test_side_calls_of_long_sessions_read_messages_few_times():
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
    assert set(side_calls(traces)) == {"title"}
    assert num_reads <= 3 * sum(len(item.messages) for item in traces)


def test_identical_calls_are_not_side_calls():
    assert set(side_calls([trace("one", ASKED), trace("two", ASKED)])) == set()
    titles = [trace(name, ASKED, metadata={SIDE_CALL_KEY: "title"}) for name in ("one", "two")]
    assert set(side_calls(titles)) == set(), "if all calls ask for titles, titles are the task"


def test_calls_of_a_started_program_can_be_side_calls():
    found = {"session_uids": ["ctx_1"], "of_program": True}
    traces = [trace("main", ASKED, tools=TOOLS, metadata=found), trace("title", ASKED, metadata=found)]
    assert set(side_calls(traces)) == {"title"}


def test_calls_of_the_agents_own_code_belong_to_the_task():
    own = {"session_uids": ["ctx_1"]}
    traces = [trace("main", ASKED, tools=TOOLS, metadata=own), trace("in a tool", ASKED, metadata=own)]
    assert set(side_calls(traces)) == set()
    for asked in ({"messages": ASKED}, {"messages": ASKED, "response_format": TITLE_SCHEMA}):
        assert side_call(asked, session_has_tools=True, is_own=True) is None
