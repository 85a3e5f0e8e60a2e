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
    completer = ChunkNormalizer("m")
    pieces = [
        {"index": number, "id": "call_0", "function": {"name": name, "arguments": part}}
        for number in (0, 1)
        for name, part in (("f", ""), (None, "{}"))
    ]
    for piece in pieces:
        completer.fill_missing_fields({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    assert (pieces[0]["id"], "id" in pieces[1], "id" in pieces[3]) == ("call_0", False, False)
    assert pieces[2]["id"] not in ("call_0", None)


def test_tokens_are_counted_if_the_server_reports_no_usage():
    response = {"choices": [{"token_ids": [7, 8]}, {"token_ids": [9]}], "prompt_token_ids": [1, 2]}
    fill_missing_fields(response, "m")
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_object_arguments_become_text():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    fill_missing_fields({"choices": [{"message": {"tool_calls": [call]}}]}, "m")
    assert call["function"]["arguments"] == '{"a":1}'
    piece = {"function": {"name": "f", "arguments": {"a": 1}}}
    ChunkNormalizer("m").fill_missing_fields({"choices": [{"delta": {"tool_calls": [piece]}}]})
    assert piece["function"]["arguments"] == '{"a":1}'


def test_only_the_first_piece_of_a_call_has_an_id():
    completer = ChunkNormalizer("m")
    pieces = [
        {"function": {"name": "f", "arguments": ""}},
        {"function": {"arguments": "{}"}},
        {"function": {"name": "g"}},
    ]
    for piece in pieces:
        completer.fill_missing_fields({"choices": [{"delta": {"tool_calls": [piece]}}]})
    assert [piece["index"] for piece in pieces] == [0, 0, 1]
    assert ["id" in piece for piece in pieces] == [True, False, True]
    assert pieces[0]["id"] != pieces[2]["id"]


def test_tool_calls_are_numbered_from_0():
    completer = ChunkNormalizer("m")
    given = [(5, "A"), (2, "B"), (5, None), (2, None)]
    pieces = [{"index": index, **({"id": name, "function": {"name": name}} if name else {})} for index, name in given]
    for piece in pieces:
        completer.fill_missing_fields({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    assert [piece["index"] for piece in pieces] == [0, 1, 0, 1]


def test_calls_with_the_same_number_are_separated_by_id():
    completer = ChunkNormalizer("m")
    pieces = [{"index": 0, "id": name, "function": {"name": "f", "arguments": "{}"}} for name in "AB"]
    pieces += [{"index": 0, "function": {"arguments": " "}}, {"index": 1, "id": "C", "function": {"name": "f"}}]
    for piece in pieces:
        completer.fill_missing_fields({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    assert [piece["index"] for piece in pieces] == [0, 1, 1, 2]


def test_id_and_name_are_sent_once():
    completer = ChunkNormalizer("m")
    pieces = [{"index": 0, "id": "A", "function": {"name": "f", "arguments": part}} for part in ('{"a"', ":1}")]
    other = {"index": 1, "id": "B", "function": {"name": "f", "arguments": "{}"}}
    for piece in (*pieces, other):
        completer.fill_missing_fields({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    assert pieces[1] == {"index": 0, "function": {"arguments": ":1}"}}
    assert (other["id"], other["function"]["name"]) == ("B", "f")


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "arguments": None}])
def test_call_without_arguments_has_empty_text(function):
    call = {"function": dict(function)}
    fill_missing_fields({"choices": [{"message": {"tool_calls": [call]}}]}, "m")
    piece = {"function": dict(function)}
    ChunkNormalizer("m").fill_missing_fields({"choices": [{"delta": {"tool_calls": [piece]}}]})
    assert call["function"] == piece["function"] == {"name": "f", "arguments": ""}


def test_only_the_first_chunk_of_a_choice_has_a_role():
    completer = ChunkNormalizer("m")
    chunks = [{"choices": [{"index": index, "delta": {"content": "x"}}]} for index in (0, 1, 0)]
    for chunk in chunks:
        completer.fill_missing_fields(chunk)
    assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True, True, False]
