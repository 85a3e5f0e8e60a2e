import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import ChatStream, SSEDecoder, traces_from_chat
from rllm.errors import TokenMismatchError
from rllm.types import Trace

REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def capture(response: dict[str, Any]) -> list[Trace]:
    return traces_from_chat(REQUEST, response, session_id="s", started_at=0.0, timings={}, metadata={})


def assemble(chunks: list[dict[str, Any]]) -> ChatStream:
    stream = ChatStream()
    for chunk in chunks:
        stream.feed(chunk)
    return stream


def pieces(draw: st.DrawFn, whole: Any) -> list[Any]:
    """Strategy for cuts of the string or list at any position; some pieces are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.text(max_size=12))}
    if draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning", "reasoning_content", "refusal"]))] = draw(st.text(min_size=1))
    if draw(st.booleans()):
        message["tool_calls"] = [
            {
                "id": f"call-{k}",
                "type": "function",
                "function": {"name": draw(st.sampled_from(["add", "search"])), "arguments": draw(st.text(max_size=20))},
            }
            for k in range(draw(st.integers(1, 3)))
        ]
    if not message["content"] and len(message) > 2:
        message["content"] = None
    return message


@st.composite
def choices(draw: st.DrawFn, index: int) -> dict[str, Any]:
    logprobs = draw(st.lists(st.floats(-20, 0), max_size=10))
    return {
        "index": index,
        "message": draw(messages()),
        "logprobs": {"content": [{"token": "t", "logprob": value, "top_logprobs": []} for value in logprobs]},
        "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
        "stop_reason": draw(st.sampled_from(["STOP", 100])),
        "token_ids": [draw(st.integers(0, 200_000)) for _ in logprobs],
    }


@st.composite
def deltas_of(draw: st.DrawFn, message: dict[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": draw(st.sampled_from(["", None]))}]
    for name in ("reasoning", "reasoning_content", "refusal", "content"):
        if message.get(name):
            deltas += [{name: piece} for piece in pieces(draw, message[name])]
    for index, call in enumerate(message.get("tool_calls", [])):
        repeats_head = draw(st.booleans())
        for position, piece in enumerate(pieces(draw, call["function"]["arguments"])):
            with_head = position == 0 or repeats_head
            function = {"name": call["function"]["name"], "arguments": piece} if with_head else {"arguments": piece}
            head = {"id": call["id"], "type": "function"} if with_head else {}
            deltas.append({"tool_calls": [{"index": index, **head, "function": function}]})
    return deltas


@st.composite
def chunks_of_choice(draw: st.DrawFn, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Text and tokens are cut independently: servers hold text back while a stop string or a tool call may follow."""
    chunks = [{"index": choice["index"], "delta": delta} for delta in draw(deltas_of(choice["message"]))]
    positions = pieces(draw, list(range(len(choice["token_ids"]))))
    while len(chunks) < len(positions):
        chunks.append({"index": choice["index"], "delta": {}})
    for chunk, covered in zip(chunks, positions, strict=False):
        chunk["token_ids"] = [choice["token_ids"][k] for k in covered]
        chunk["logprobs"] = {"content": [choice["logprobs"]["content"][k] for k in covered]}
    last = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    if draw(st.booleans()):
        chunks[-1] |= last
    else:
        chunks.append({"index": choice["index"], "delta": {}, **last})
    return chunks


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw a response, and one of the streams with the same content."""
    response = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [draw(choices(index)) for index in range(draw(st.integers(1, 3)))],
        "prompt_token_ids": draw(st.lists(st.integers(0, 200_000), min_size=1)),
        "usage": {"completion_tokens": 3},
    }
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "tiny"}
    waiting = [draw(chunks_of_choice(choice)) for choice in response["choices"]]
    chunks: list[dict[str, Any]] = []
    while any(waiting):
        queue = draw(st.sampled_from([queue for queue in waiting if queue]))
        chunks.append({**head, "choices": [queue.pop(0)], "prompt_token_ids": None, "usage": None})
    chunks[0]["prompt_token_ids"] = response["prompt_token_ids"]
    chunks.append({**head, "choices": [], "usage": response["usage"]})
    return response, chunks


@given(exchanges())
def test_streamed_and_unstreamed_answers_give_equal_traces(exchange):
    response, chunks = exchange
    before = copy.deepcopy(chunks)
    stream = assemble(chunks)
    assert stream.response() == response
    assert capture(stream.response()) == capture(response)
    assert stream.finished
    assert chunks == before


@given(exchanges(), st.data())
def test_interrupted_stream_keeps_what_arrived(exchange, data):
    response, chunks = exchange
    arrived = chunks[: data.draw(st.integers(1, len(chunks)))]
    stream = assemble(arrived)
    whole = {trace.choice_index: trace for trace in capture(response)}
    for trace in capture(stream.response()):
        full = whole[trace.choice_index]
        assert trace.prompt_ids == full.prompt_ids
        assert trace.response_ids == full.response_ids[: len(trace.response_ids)]
        assert trace.logprobs == full.logprobs[: len(trace.response_ids)]
        assert trace.finish_reason in (full.finish_reason, "abort")
    assert stream.finished == all(trace.finish_reason != "abort" for trace in capture(stream.response()))


def test_stream_interrupted_before_any_token_has_an_error():
    first = {
        "id": "c",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": [1],
    }
    [trace] = capture(assemble([first]).response())
    assert (trace.finish_reason, trace.prompt_ids, trace.response) == (
        "abort",
        [1],
        {"role": "assistant", "content": ""},
    )
    assert trace.error is not None


@pytest.mark.parametrize("more", [{"token_ids": [3]}, {"finish_reason": "stop", "token_ids": []}])
def test_answers_with_the_same_index_are_not_merged(more: dict[str, Any]):
    answer = {"index": 0, "delta": {"content": "a"}, "token_ids": [2], "finish_reason": "stop"}
    stream = assemble([{"choices": [answer]}])
    with pytest.raises(TokenMismatchError, match="same index"):
        stream.feed({"choices": [{"index": 0, "delta": {"content": "b"}, **more}]})
    assert stream.response()["choices"][0]["token_ids"] == [2]


def test_empty_finish_reason_does_not_end_the_stream():
    answer = {"index": 0, "delta": {"content": "a"}, "token_ids": [2], "finish_reason": ""}
    stream = assemble([{"choices": [answer]}] * 2)
    assert not stream.finished
    stream.feed({"choices": [{**answer, "finish_reason": "stop"}]})
    [choice] = stream.response()["choices"]
    assert (stream.finished, choice["token_ids"], choice["finish_reason"]) == (True, [2, 2, 2], "stop")


def test_end_without_tokens_may_be_repeated():
    end = {"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}
    assert assemble([{"choices": [end]}, {"choices": [end]}]).finished


def test_stream_without_chunks_is_not_finished():
    assert not ChatStream().finished
    [trace] = capture(ChatStream().response())
    assert trace.error is not None


def test_tool_calls_without_index_are_separated_by_id():
    calls = [{"id": name, "function": {"name": "add", "arguments": "{}"}} for name in ("a", "b")]
    deltas = [{"index": 0, "delta": {"tool_calls": [call]}} for call in calls]
    more = {"index": 0, "delta": {"tool_calls": [{"function": {"arguments": " "}}]}}
    [choice] = assemble([{"choices": [delta]} for delta in [*deltas, more]]).response()["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "a", "function": {"name": "add", "arguments": "{}"}},
        {"id": "b", "function": {"name": "add", "arguments": "{} "}},
    ]


def test_arguments_sent_as_an_object_are_kept_as_they_are():
    arguments = {"index": 2, "input": "a", "unit": None, "place": {"index": 1}}
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": arguments}}
    [choice] = assemble([{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}]).response()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("heads", "arguments"),
    [
        ([{"index": 5, "id": "A"}, {"index": 2, "id": "B"}, {"index": 5}, {"index": 2}], ["02", "13"]),
        ([{"index": 0, "id": "A"}, {"index": 0, "id": "B"}, {"index": 0}], ["0", "12"]),
        ([{"index": 0, "id": "A"}, {"index": 0, "id": "A"}, {"index": 1, "id": "B"}], ["01", "2"]),
        ([{"name": "f"}, {}, {"name": "g"}], ["01", "2"]),
    ],
    ids=["numbers in any order", "one number for all", "ids repeated", "neither numbers nor ids"],
)
def test_tool_calls_are_assembled_in_the_order_of_their_beginnings(heads, arguments):
    pieces = []
    for position, head in enumerate(heads):
        name = head.pop("name", "f" if "id" in head else None)
        pieces.append({**head, "function": {"name": name, "arguments": str(position)}})
    deltas = [{"index": 0, "delta": {"tool_calls": [piece]}} for piece in pieces]
    [choice] = assemble([{"choices": [delta]} for delta in deltas]).response()["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == arguments


def test_unknown_server_fields_are_kept():
    chunk = {"choices": [{"index": 0, "delta": {"content": "x", "audio": {"id": 1}}, "routed": [1]}], "extra": 5}
    response = assemble([chunk]).response()
    assert response["extra"] == 5
    assert response["choices"][0]["routed"] == [1]
    assert response["choices"][0]["message"]["audio"] == {"id": 1}


EVENTS = b'data: {"a": 1}\n\n: a comment\n\nevent: x\r\nid: 7\r\ndata:{"b": 2}\r\n\r\ndata: two\rdata:  lines\r\rdata\r\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b'{"b": 2}', b"two\n lines", b"", b"[DONE]"]


@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_events_can_be_split_at_any_byte(cut: int):
    decoder = SSEDecoder()
    assert decoder.feed(EVENTS[:cut]) + decoder.feed(EVENTS[cut:]) == PAYLOADS


def test_events_can_arrive_byte_by_byte():
    decoder = SSEDecoder()
    assert [payload for byte in EVENTS for payload in decoder.feed(bytes([byte]))] == PAYLOADS


@pytest.mark.parametrize("cut", range(8))
def test_byte_order_mark_is_not_part_of_the_first_event(cut: int):
    events, decoder = b"\xef\xbb\xbfdata: a\n\ndata: b\n\n", SSEDecoder()
    assert decoder.feed(events[:cut]) + decoder.feed(events[cut:]) == [b"a", b"b"]


def test_event_cut_off_by_the_connection_is_not_reported():
    assert SSEDecoder().feed(b"data: whole\n\ndata: ha") == [b"whole"]


lines = st.binary(max_size=8).filter(lambda line: b"\n" not in line and b"\r" not in line)
line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=5), st.data())
def test_events_are_parsed_with_any_line_ends_comments_and_splits(events, data):
    encoded = b""
    for event in events:
        end = data.draw(line_ends)
        if data.draw(st.booleans()):
            encoded += b": keep-alive" + end
        encoded += b"".join(b"data: " + line + end for line in event) + end
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    decoder = SSEDecoder()
    parts = [encoded[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    assert [payload for part in parts for payload in decoder.feed(part)] == [b"\n".join(event) for event in events]
