import pytest

from rllm.gateway.dialects.chat import ChunkNormalizer, fill_missing_fields


def test_complete_answer_is_unchanged():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    response = {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 1}}
    before = repr(response)
    fill_missing_fields(response, "other")
    assert repr(response) == before


@pytest.mark.parametrize("calls", [[], [{"function": {"name": "f", "arguments": ""}}]])
def test_missing_fields_are_filled_in(calls):
    response = {"choices": [{"message": {"content": "x", "tool_calls": calls}}, {}]}
    fill_missing_fields(response, "m")
    first, second = response["choices"]
    assert (response["model"], first["index"], second["index"]) == ("m", 0, 1)
    assert (first["message"]["role"], second["message"]) == ("assistant", {"content": "", "role": "assistant"})
    assert first["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)


def test_answers_with_the_same_index_are_renumbered():
    response = {"choices": [{"index": 0, "token_ids": [1]}, {"index": 0, "token_ids": [2]}]}
    fill_missing_fields(response, "m")
    assert [choice["index"] for choice in response["choices"]] == [0, 1]


def test_calls_with_the_same_id_get_distinct_ids():
    calls = [{"id": "call_0", "function": {"name": "f", "arguments": "{}"}} for _ in range(3)]
    fill_missing_fields({"choices": [{"message": {"tool_calls": calls}}]}, "m")
    assert calls[0]["id"] == "call_0"
    assert len({call["id"] for call in calls}) == 3


def test_tokens_are_counted_if_the_server_reports_no_usage():
    response = {"choices": [{"token_ids": [7, 8]}, {"token_ids": [9]}], "prompt_token_ids": [1, 2]}
    fill_missing_fields(response, "m")
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_object_arguments_become_text():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    fill_missing_fields({"choices": [{"message": {"tool_calls": [call]}}]}, "m")
    assert call["function"]["arguments"] == '{"a":1}'


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "arguments": None}])
def test_call_without_arguments_has_empty_text(function):
    call = {"function": dict(function)}
    fill_missing_fields({"choices": [{"message": {"tool_calls": [call]}}]}, "m")
    assert call["function"] == {"name": "f", "arguments": ""}


def test_only_the_first_chunk_of_a_choice_has_a_role():
    completer = ChunkNormalizer("m")
    chunks = [{"choices": [{"index": index, "delta": {"content": "x"}}]} for index in (0, 1, 0)]
    for chunk in chunks:
        completer.fill_missing_fields(chunk)
    assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True, True, False]
