"""Metadata of a trace about the program that called."""

from rllm.types import SIDE_CALL_KEY

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED = {"model": "m", "messages": [{"role": "user", "content": "fix the bug"}]}
TITLE = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"properties": {"title": {"type": "string"}}}}}


def metadata(served):
    return [trace.metadata for trace in served.store.by_session("s")]


def test_headers_that_name_sub_agents_are_kept(serve):
    served = serve()
    served.post(headers={"X-Claude-Code-Agent-Id": "agent-1", "x-parent-session-id": "ses_2"})
    assert metadata(served) == [{"x-claude-code-agent-id": "agent-1", "x-parent-session-id": "ses_2"}]


def test_call_without_tools_among_calls_with_tools_is_tagged(serve):
    served = serve()
    served.post(json={**ASKED, "tools": TOOLS})
    served.post(json=ASKED)
    assert metadata(served) == [{}, {SIDE_CALL_KEY: "without tools"}]


def test_restarted_gateway_remembers_the_tools(serve):
    first = serve()
    first.post(json={**ASKED, "tools": TOOLS})
    again = serve(store=first.store)
    again.post(json=ASKED)
    assert metadata(again)[1] == {SIDE_CALL_KEY: "without tools"}


def test_title_call_is_tagged_in_every_dialect(serve):
    schema = TITLE["json_schema"]["schema"]
    served = serve(['{"title": "Fix"}'])
    served.post(json={**ASKED, "response_format": TITLE})
    responses = {
        "model": "m",
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "t", "schema": schema}},
    }
    messages = {**ASKED, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert served.post("/sessions/s/v1/responses", json=responses).status_code == 200
    assert served.post("/sessions/s/v1/messages", json=messages).status_code == 200
    assert [one[SIDE_CALL_KEY] for one in metadata(served)] == ["title"] * 3
