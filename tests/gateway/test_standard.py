import pytest

from rllm.gateway.errors import UpstreamError
from rllm.gateway.standard import ChunkCompleter, complete_response


def test_a_complete_answer_stays_as_it_is():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = {"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    before = repr(response)
    complete_response(response, "other")
    assert repr(response) == before


@pytest.mark.parametrize("calls", [[], [{"function": {"name": "f", "arguments": ""}}]])
def test_what_is_missing_is_filled_in(calls):
    response = {"choices": [{"message": {"content": "x", "tool_calls": calls}}, {}]}
    complete_response(response, "m")
    first, second = response["choices"]
    assert (response["model"], first["index"], second["index"]) == ("m", 0, 1)
    assert (first["message"]["role"], second["message"]) == ("assistant", {"content": "", "role": "assistant"})
    assert first["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)


def test_pieces_of_a_call_keep_its_index_and_only_the_first_gets_an_id():
    completer = ChunkCompleter("m")
    pieces = [
        {"function": {"name": "f", "arguments": ""}},
        {"function": {"arguments": "{}"}},
        {"function": {"name": "g"}},
    ]
    for piece in pieces:
        completer.complete({"choices": [{"delta": {"tool_calls": [piece]}}]})
    assert [piece["index"] for piece in pieces] == [0, 0, 1]
    assert ["id" in piece for piece in pieces] == [True, False, True]
    assert pieces[0]["id"] != pieces[2]["id"]


def test_only_the_first_chunk_of_a_choice_gets_a_role():
    completer = ChunkCompleter("m")
    chunks = [{"choices": [{"index": index, "delta": {"content": "x"}}]} for index in (0, 1, 0)]
    for chunk in chunks:
        completer.complete(chunk)
    assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True, True, False]


@pytest.mark.parametrize(
    "choices", ["x", [1], [{"message": "x"}], [{"message": {"tool_calls": [1]}}], [{"message": {"tool_calls": 3}}], 5]
)
def test_what_is_no_chat_completion_is_the_upstreams_failure(choices):
    with pytest.raises(UpstreamError, match="no chat completion") as failed:
        complete_response({"choices": choices}, "m")
    assert failed.value.status_code == 502
    streamed = (
        [{"delta": choice["message"]} if isinstance(choice, dict) else choice for choice in choices]
        if isinstance(choices, list)
        else choices
    )
    with pytest.raises(UpstreamError, match="no chat completion"):
        ChunkCompleter("m").complete({"choices": streamed})
