"""The tools of OpenAI's responses, which a chat knows as functions: in namespaces, with plain text, and chosen."""

import orjson
import pytest

from rllm.capture import SSEDecoder
from rllm.gateway.dialects.responses import ResponsesStreamEncoder, from_chat
from rllm.gateway.dialects.responses_input import to_chat
from rllm.gateway.errors import GatewayError

ADD = {"type": "function", "name": "add"}
RUN = {"type": "custom", "name": "run"}


def namespace(name, *tools):
    return {"type": "namespace", "name": name, "description": "d", "tools": [*tools]}


def chat(**asked):
    return to_chat({"model": "m", "input": "hi", **asked}, {})


def names_in_chat(*tools, **asked):
    return [tool["function"]["name"] for tool in chat(tools=[*tools], **asked).get("tools", ())]


def calling(name, arguments="{}"):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def called(name, *tools, arguments="{}"):
    """Return the item for a chat's call."""
    message = {"role": "assistant", "content": None, "tool_calls": [calling(name, arguments)]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    [item] = from_chat({"id": "resp_1", "choices": [choice]}, {"tools": [*tools]})["output"]
    return item


def refusal(**asked):
    with pytest.raises(GatewayError) as refused:
        chat(**asked)
    assert refused.value.status == 400
    return str(refused.value)


def test_namespaced_function_is_called_by_both_names():
    item = called("math__add", namespace("math", ADD))
    assert names_in_chat(namespace("math", ADD)) == ["math__add"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "add", "math")
    assert "namespace" not in called("add", ADD)


def test_custom_tool_in_a_namespace_has_both_names():
    item = called("box__run", namespace("box", RUN), arguments='{"input": "ls"}')
    assert (item["type"], item["name"], item["namespace"], item["input"]) == ("custom_tool_call", "run", "box", "ls")


def test_functions_with_the_same_name_are_distinguished():
    tools = (namespace("crm", ADD), namespace("erp", ADD), ADD)
    assert names_in_chat(*tools) == ["crm__add", "erp__add", "add"]
    shown = [called(name, *tools) for name in names_in_chat(*tools)]
    assert [(item["name"], item.get("namespace")) for item in shown] == [("add", "crm"), ("add", "erp"), ("add", None)]


def test_call_is_returned_under_the_name_known_to_the_chat():
    tools = [namespace("crm", ADD), namespace("erp", ADD)]
    call = called("erp__add", *tools)
    [_, turn] = chat(input=[{"role": "user", "content": "hi"}, call], tools=tools)["messages"]
    assert turn["tool_calls"] == [calling("erp__add")]


def test_streamed_call_is_announced_with_its_namespace():
    encoder = ResponsesStreamEncoder({"tools": [namespace("math", ADD)]})
    call, ended = calling("math__add"), {"index": 0, "finish_reason": "tool_calls"}
    chunk = {"id": "resp_1", "choices": [{**ended, "delta": {"tool_calls": [{"index": 0, **call}]}}]}
    response = {"id": "resp_1", "choices": [{**ended, "message": {"tool_calls": [call]}}]}
    sent = encoder.feed([chunk]) + encoder.finish(response)
    events = [orjson.loads(payload) for payload in SSEDecoder().feed(sent)]
    items = [event["item"] for event in events if "item" in event]
    assert [(item["name"], item["namespace"]) for item in items] == [("add", "math")] * 2


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"type": "function", "name": "add"}, ["crm__add", "erp__add"]),
        ({"type": "function", "name": "add", "namespace": "erp"}, ["erp__add"]),
        ({"type": "namespace", "name": "crm"}, ["crm__add"]),
        ({"type": "custom", "name": "run"}, ["erp__run"]),
    ],
)
def test_tools_in_namespaces_can_be_allowed(named, expected):
    tools = (namespace("crm", ADD), namespace("erp", ADD, RUN))
    assert names_in_chat(*tools, tool_choice={"type": "allowed_tools", "tools": [named]}) == expected


@pytest.mark.parametrize(
    ("named", "expected"), [({"name": "run"}, "erp__run"), ({"name": "add", "namespace": "erp"}, "erp__add")]
)
def test_tool_in_a_namespace_can_be_forced(named, expected):
    asked = chat(tools=[namespace("crm", ADD), namespace("erp", ADD, RUN)], tool_choice={"type": "function", **named})
    assert asked["tool_choice"] == {"type": "function", "function": {"name": expected}}


def test_forced_function_outside_of_namespaces_takes_precedence():
    asked = chat(tools=[namespace("crm", ADD), ADD], tool_choice=ADD)
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_choice_among_unknown_tools_is_rejected():
    unknown = {"type": "allowed_tools", "tools": [{"type": "function", "name": "ad"}]}
    assert "'ad' are not in 'tools'" in refusal(tools=[ADD], tool_choice=unknown)


@pytest.mark.parametrize("allowed", [[], [{"type": "web_search"}], [{"type": "mcp", "server_label": "wiki"}]])
def test_choice_without_client_tools_shows_none(allowed):
    assert names_in_chat(ADD, tool_choice={"type": "allowed_tools", "tools": allowed}) == []


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "apply_patch"},
        {"type": "computer"},
        {"type": "local_shell"},
        {"type": "shell"},
        {"type": "shell", "environment": {"type": "local"}},
    ],
)
def test_tool_run_by_its_client_must_be_a_function(tool):
    assert f"tools[].type='{tool['type']}'" in refusal(tools=[ADD, tool])
    assert "give a function" in refusal(tools=[tool], tool_choice="required")


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"type": "mcp"}, {"type": "shell", "environment": {"type": "container_auto"}}]
)
def test_server_tool_is_left_out(tool):
    assert names_in_chat(ADD, tool) == ["add"]
