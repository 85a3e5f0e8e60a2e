"""OpenAI's responses in terms of chat completions, case by case."""

import pytest

from rllm.gateway.dialects.responses import from_chat
from rllm.gateway.dialects.responses_input import INSTRUCTIONS_KEY, refers_to, to_chat
from rllm.gateway.errors import GatewayError
from rllm.types import Trace

HI = {"role": "user", "content": "hi"}
OWN = "0" * 32
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1.0}'}}


def chat(earlier=None, **asked):
    return to_chat({"model": "m", "input": "hi", **asked}, earlier or {})


def answer(message, reason="stop", *, asked=None, **choice):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason, **choice}
    response = {"id": f"resp_{OWN}", "created": 7, "model": "m", "choices": [choice]}
    return from_chat({**response, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, asked or {})


def trace(messages, response, **metadata):
    return Trace(
        id=f"resp_{OWN}",
        call_id="c",
        session_id="s",
        model="m",
        messages=messages,
        response=response,
        metadata=metadata,
    )


def test_request_is_translated_to_chat():
    asked = chat(instructions="be brief", max_output_tokens=9, temperature=0.5, stream=True, seed=7)
    assert asked == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "stream": True,
        "seed": 7,
        "messages": [{"role": "system", "content": "be brief"}, HI],
    }


def test_irrelevant_fields_are_dropped_and_unknown_ones_kept():
    ignored = {
        "store": False,
        "metadata": {},
        "truncation": "auto",
        "prompt_cache_key": "k",
        "user": "u",
        "include": [],
    }
    assert chat(**ignored, top_k=3).keys() == {"model", "messages", "top_k"}


def test_items_of_one_turn_are_one_message():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        HI,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "adding"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":  1.0}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "message", "role": "assistant", "content": "one"},
        {"type": "message", "role": "assistant", "content": "two"},
    ]
    second = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{"}}
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "be brief"},
        HI,
        {"role": "assistant", "content": "adding", "reasoning_content": "hm", "tool_calls": [CALL, second]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


def test_answer_split_by_late_reasoning_is_one_turn():
    reasoning, message, call = answer({"content": "adding", "reasoning": "hm", "tool_calls": [CALL]})["output"]
    empty = {**message, "id": None, "content": [{"type": "output_text", "text": "", "annotations": []}]}
    assert chat(input=[HI, message, {**reasoning, "content": []}, empty, call])["messages"][1:] == [
        {"role": "assistant", "content": "adding", "reasoning_content": "hm", "tool_calls": [CALL]}
    ]


def test_items_of_two_answers_are_two_turns():
    thought, cut_off = answer({"content": "", "reasoning": "hm"})["output"]
    later = {**cut_off, "id": f"msg_{'1' * 32}", "content": [{"type": "output_text", "text": "four"}]}
    assert chat(input=[HI, thought, later])["messages"][1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "four"},
    ]


@pytest.mark.parametrize("kept", ["content", "encrypted_content", "summary"])
def test_reasoning_is_accepted_wherever_a_client_keeps_it(kept):
    [reasoning, _] = answer({"content": "x", "reasoning_content": "hm"})["output"]
    given = {**reasoning, "content": None, "encrypted_content": None, "summary": []}
    given[kept] = reasoning[kept] if kept != "summary" else [{"type": "summary_text", "text": "hm"}]
    assert chat(input=[HI, given, HI])["messages"][1]["reasoning_content"] == "hm"


def test_images_files_and_audio_are_passed_on():
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
    ]
    [message] = chat(input=[{"role": "user", "content": parts}])["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "x"}},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
    ]


def test_tools_become_functions():
    inner = {"type": "function", "name": "b", "parameters": None}
    tools = [
        {"type": "function", "name": "a", "description": "A.", "strict": True, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "n", "tools": [inner]},
        {"type": "custom", "name": "patch", "description": "Edit."},
        {"type": "web_search"},
    ]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert [tool["function"] for tool in chat(tools=tools)["tools"]] == [
        {"name": "a", "description": "A.", "strict": True, "parameters": {"type": "object"}},
        {"name": "n__b", "parameters": {"type": "object", "properties": {}}},
        {"name": "patch", "description": "Edit.", "parameters": text},
    ]


def test_tools_may_be_an_input_item():
    items = [{"type": "additional_tools", "tools": [{"type": "function", "name": "a"}]}, HI]
    assert chat(input=items)["tools"][0]["function"]["name"] == "a"


@pytest.mark.parametrize(
    ("choice", "expected", "num_tools"),
    [
        ("auto", "auto", 2),
        ("required", "required", 2),
        ("none", "none", 2),
        ({"type": "function", "name": "a"}, {"type": "function", "function": {"name": "a"}}, 2),
        ({"type": "custom", "name": "p"}, {"type": "function", "function": {"name": "p"}}, 2),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]}, "required", 1),
    ],
)
def test_all_forms_of_tool_choice_are_translated(choice, expected, num_tools):
    asked = chat(tools=[{"type": "function", "name": "a"}, {"type": "custom", "name": "p"}], tool_choice=choice)
    assert (asked["tool_choice"], len(asked["tools"])) == (expected, num_tools)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}},
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}},
        ),
    ],
)
def test_structured_output_becomes_a_response_format(form, expected):
    assert chat(text={"format": form}).get("response_format") == expected


def test_effort_and_verbosity_are_translated():
    asked = chat(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"})
    assert [asked[name] for name in ("reasoning_effort", "verbosity")] == ["low", "low"]


def test_answer_becomes_a_list_of_items():
    response = answer({"content": "adding", "reasoning": "hm", "tool_calls": [CALL]}, "tool_calls")
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "adding", "annotations": [], "logprobs": []}]
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", '{"a":  1.0}')
    assert [item["id"] for item in response["output"]] == [f"rs_{OWN}", f"msg_{OWN}", f"fc_{OWN}_0"]
    assert (response["status"], response["object"], response["created_at"]) == ("completed", "response", 7)
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


@pytest.mark.parametrize(
    ("reason", "why"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("abort", "max_output_tokens")],
)
def test_truncated_answer_is_incomplete(reason, why):
    response = answer({"content": "x"}, reason)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": why})
    assert response["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("reason", "types"), [("length", ["reasoning"]), ("abort", ["reasoning"]), ("stop", ["reasoning", "message"])]
)
def test_answer_truncated_in_its_reasoning_has_no_message(reason, types):
    output = answer({"content": None, "reasoning": "hm"}, reason)["output"]
    assert [item["type"] for item in output] == types
    assert output[-1]["status"] == ("completed" if reason == "stop" else "incomplete")


def test_answer_truncated_at_once_has_an_empty_message():
    [message] = answer({"content": ""}, "length")["output"]
    assert (message["content"][0]["text"], message["status"]) == ("", "incomplete")


PATCH = {"type": "custom", "name": "patch"}
NO_TOOLS = {"type": "allowed_tools", "tools": []}


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [PATCH]},
        {"input": [{"type": "additional_tools", "tools": [PATCH]}, HI]},
    ],
)
def test_custom_tool_takes_and_returns_text(asked):
    custom = {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "+1 ü"}'}}
    [call] = answer({"content": None, "tool_calls": [custom]}, asked=asked)["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "+1 ü")
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    assert chat(input=[HI, call, output])["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


def test_continued_response_drops_the_instructions():
    text = {"role": "assistant", "content": "hello"}
    before = trace([{"role": "system", "content": "old"}, HI], text, **{INSTRUCTIONS_KEY: True})
    asked = {"previous_response_id": before.id, "instructions": "new"}
    assert refers_to(asked) == [before.id]
    assert chat({before.id: before}, **asked, input="more")["messages"] == [
        {"role": "system", "content": "new"},
        HI,
        text,
        {"role": "user", "content": "more"},
    ]


def test_continued_response_keeps_an_input_system_message():
    before = trace([{"role": "system", "content": "rules"}, HI], {"role": "assistant", "content": "hello"})
    messages = chat({before.id: before}, previous_response_id=before.id)["messages"]
    assert messages[0] == {"role": "system", "content": "rules"}


def test_item_can_be_referenced():
    before = trace([HI], {"role": "assistant", "content": "hello", "tool_calls": [CALL]})
    items = [HI, *({"type": "item_reference", "id": item} for item in (f"msg_{OWN}", f"fc_{OWN}_0"))]
    assert set(refers_to({"input": items})) == {before.id}
    assert chat({before.id: before}, input=items)["messages"] == [
        HI,
        {"role": "assistant", "content": "hello", "tool_calls": [CALL]},
    ]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"input": None}, "'input' is missing or empty"),
        ({"input": 3}, "'input' is a JSON number"),
        ({"input": ["hi"]}, "input[0]='hi'"),
        ({"input": [{"type": "hologram"}]}, "hologram"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "scent"}]}]}, "scent"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "'msg_x' not found"),
        ({"instructions": 3}, "'instructions' is a JSON number"),
        ({"background": True}, "background=True"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm is not supported"),
        ({"multi_agent": {"enabled": True}}, "multi_agent.enabled is not supported"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": "x"}, "'tools'"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}], "tool_choice": NO_TOOLS}, "tools[].tools[0]=3"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": "low"}, "reasoning"),
        ({"stream": 1}, "stream=1"),
        ({"n": 2}, "n=2: a response is one answer"),
    ],
)
def test_malformed_request_error_names_the_field(asked, named):
    with pytest.raises(GatewayError) as refused:
        chat(**asked)
    assert refused.value.status == 400
    assert named in str(refused.value)


def test_unknown_previous_response_has_the_error_code_that_clients_expect():
    with pytest.raises(GatewayError, match="resp_x") as refused:
        chat(previous_response_id="resp_x")
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_empty_reasoning_text_does_not_drop_the_answer():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": 5}, {"type": "reasoning_text"}]}
    [answer, _] = chat(input=[thought, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])[
        "messages"
    ]
    assert answer == {"role": "assistant", "reasoning_content": "5", "content": "a"}
