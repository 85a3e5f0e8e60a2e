"""Anthropic's messages in terms of chat completions, case by case."""

import pytest

from rllm.gateway.dialects.messages import error_to_dict, from_chat, to_chat
from rllm.gateway.errors import GatewayError

HI = [{"role": "user", "content": "hi"}]


def chat(**asked):
    return to_chat({"model": "m", "max_tokens": 10, "messages": HI, **asked})


RESULT = {"type": "tool_result", "tool_use_id": "c"}


def messages_of(role, *blocks):
    return {"messages": [{"role": role, "content": list(blocks)}, *HI]}


def answer(message, reason="stop", **response):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return from_chat({"id": "msg_1", "model": "m", "choices": [choice], **response}, {})


def test_request_is_translated_to_chat():
    asked = chat(temperature=0.5, top_k=4, stop_sequences=["END"], stream=True, seed=7)
    assert asked == {
        "model": "m",
        "max_tokens": 10,
        "temperature": 0.5,
        "top_k": 4,
        "stop": ["END"],
        "stream": True,
        "seed": 7,
        "messages": HI,
    }


def test_anthropic_fields_are_dropped_and_unknown_ones_kept():
    ignored = {"cache_control": {}, "metadata": {"user_id": "u"}, "context_management": {}, "betas": [], "thinking": {}}
    assert chat(**ignored, chat_template_kwargs={"a": 1}).keys() == {
        "model",
        "max_tokens",
        "messages",
        "chat_template_kwargs",
    }


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("be brief", "be brief"),
        ([{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}], "be brief"),
        (
            [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        ),
    ],
)
def test_system_prompt_is_text_or_a_list_of_texts(system, content):
    assert chat(system=system)["messages"] == [{"role": "system", "content": content}, *HI]


@pytest.mark.parametrize(
    ("clear_at", "shown"),
    [("next_user_message", ["user", "user", "system"]), ("never", ["user", "system", "user", "system"])],
)
def test_system_message_may_apply_to_one_user_turn(clear_at, shown):
    reminder = {"role": "system", "content": "be brief", "clear_at": clear_at, "output_config": {}}
    messages = chat(messages=[*HI, reminder, *HI, reminder])["messages"]
    assert [message["role"] for message in messages] == shown
    assert messages[-1] == {"role": "system", "content": "be brief"}


def test_tool_turn_becomes_a_call_and_a_message_for_each_result():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "adding"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1.0, "ü": "ß"}},
        {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": False},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}]},
        {"type": "text", "text": "go on"},
    ]
    turn = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    assert chat(messages=[*HI, *turn])["messages"][1:] == [
        {
            "role": "assistant",
            "content": "adding",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0, "ü": "ß"}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "user", "content": "go on"},
    ]


def test_images_and_documents_are_passed_on():
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
        {
            "type": "document",
            "title": "a.pdf",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="},
        },
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
        {"type": "text", "text": "what is it?"},
    ]
    [message] = chat(messages=[{"role": "user", "content": blocks}])["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,eA=="}},
        {"type": "text", "text": "words"},
        {"type": "text", "text": "what is it?"},
    ]


def test_tool_result_may_be_an_image():
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "image", "source": {"type": "url", "url": "u"}}],
    }
    [message] = chat(messages=[{"role": "user", "content": [result]}])["messages"]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "u"}}]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"is_error": True}, "The tool failed."),
        ({"is_error": True, "content": []}, "The tool failed."),
        ({"is_error": True, "content": "no such file"}, "no such file"),
        ({"is_error": False}, ""),
    ],
)
def test_failed_tool_without_output_is_reported_as_failed(result, content):
    [message] = chat(messages=[{"role": "user", "content": [RESULT | result]}])["messages"]
    assert message == {"role": "tool", "tool_call_id": "c", "content": content}


def test_server_tools_of_anthropic_are_left_out():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [
        {"name": "add", "description": "Add.", "input_schema": schema, "strict": True, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    function = {"name": "add", "description": "Add.", "strict": True, "parameters": schema}
    assert chat(tools=tools)["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_all_forms_of_tool_choice_are_translated(choice, expected):
    asked = chat(tools=[{"name": "f", "input_schema": {}}], tool_choice=choice)
    assert {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("type", "name"),
    [
        ("bash_20250124", "bash"),
        ("browser_toolset_20260801", None),
        ("computer_20251124", "computer"),
        ("computer_toolset_20260801", None),
        ("memory_20250818", "memory"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
    ],
)
def test_client_tool_without_description_is_rejected(type, name):
    tool = {"type": type, "name": name} if name else {"type": type}
    with pytest.raises(GatewayError, match=f"{type}.*give '{name or type}' as a tool with an input_schema") as refused:
        chat(tools=[tool])
    assert refused.value.status == 400


def test_tool_choice_without_tools_is_dropped():
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    assert not {"tools", "tool_choice"} & chat(tools=hosted, tool_choice={"type": "auto"}).keys()


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_structured_output_becomes_a_response_format(place):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = chat(**({place: form} if place == "output_format" else {place: {"format": form, "effort": "low"}}))
    assert asked["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    assert asked.get("reasoning_effort") == ("low" if place == "output_config" else None)


def test_answer_becomes_a_message():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
    message = {"content": "adding", "reasoning": "hm", "tool_calls": [call]}
    assert answer(message, "tool_calls", usage=usage) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "msg_1"},
            {"type": "text", "text": "adding"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 6,
        },
    }


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"x"', '{"a":' * 300 + "1" + "}" * 300])
def test_arguments_that_are_not_an_object_are_returned_as_sampled(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    [block] = answer({"content": None, "tool_calls": [call]})["content"]
    [sent] = chat(messages=[*HI, {"role": "assistant", "content": [block]}, *HI])["messages"][1]["tool_calls"]
    assert sent == call


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("tool_calls", "tool_use"),
        ("content_filter", "refusal"),
        ("abort", "max_tokens"),
    ],
)
def test_finish_reasons_become_stop_reasons(reason, stop_reason):
    assert answer({"content": "x"}, reason)["stop_reason"] == stop_reason


def test_stop_sequence_that_ended_an_answer_is_returned():
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}
    message = from_chat({"choices": [choice]}, {"stop_sequences": ["END"]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_empty_answer_has_a_block_that_clients_can_read():
    assert answer({"content": ""})["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_answer_that_ended_in_its_thinking_has_no_text(reason):
    thought = {"type": "thinking", "thinking": "hm", "signature": "msg_1"}
    assert answer({"content": None, "reasoning_content": "hm"}, reason)["content"] == [thought]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"messages": None}, "'messages' is a JSON null"),
        ({"messages": "hi"}, "'messages' is a JSON string"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hi"]}, "messages[0]='hi'"),
        ({"messages": [{"content": "hi"}]}, "'messages[0].role' is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "base64 or url"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "end with a user message"),
        ({"system": 3}, "'system' is a JSON number"),
        ({"tools": {"a": 1}}, "'tools' is a JSON object"),
        ({"tools": [{}]}, "tools[].name"),
        ({"tool_choice": "auto"}, "tool_choice='auto'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
        ({"compaction": {"type": "summarize"}}, "does not summarize conversations: leave it out"),
        ({"stream": "yes"}, "stream='yes'"),
        ({"n": 0}, "n=0"),
        ({"n": 2}, "n=2: a message is one answer"),
        (messages_of("user", RESULT, {"type": "x"}), "messages[0].content[1].type='x'"),
        (messages_of("user", {"type": "text", "text": "t"}, {"type": "x"}, RESULT), "messages[0].content[1].type='x'"),
        (messages_of("assistant", {"type": "redacted_thinking"}, {"type": "text"}), "messages[0].content[1].text"),
    ],
)
def test_malformed_request_error_names_the_field(asked, named):
    with pytest.raises(GatewayError) as refused:
        chat(**asked)
    assert refused.value.status == 400
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropic_names(status, type):
    shown = error_to_dict(GatewayError(status, "why"))
    assert shown == {"type": "error", "error": {"type": type, "message": "why"}}


def test_threads_are_rejected_so_that_clients_recover():
    with pytest.raises(GatewayError) as refused:
        chat(thread={"type": "create"})
    shown = error_to_dict(refused.value)["error"]
    assert (refused.value.status, shown["type"]) == (400, "invalid_request_error")
    assert shown["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["model"]}
