"""The compiled reader rebuilds streams as Python does."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm._runtime import native
from rllm.capture import ChatStream, SSEDecoder
from rllm.capture.tokens import tokens_of_choice
from rllm.errors import TokenMismatchError
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.events import parse_events, split_events

from .test_native import ENTRY, as_lists, spacing

pytestmark = pytest.mark.skipif(native.compiled is None, reason="rllm_native is not installed: make native")

HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
deltas = st.one_of(
    st.fixed_dictionaries({"content": st.text(max_size=3)}),
    st.sampled_from([{}, {"role": "assistant", "content": ""}, {"reasoning_content": "r"}, {"content": None}]),
    st.sampled_from(
        [{"content": "x", "tool_calls": None}, {"content": "\ud83d"}, {"content": "\ude00"}, {"content": "\x00\n\\u"}]
    ),
)
stream_entries = st.lists(st.fixed_dictionaries({"logprob": st.floats(-9, 0)}), max_size=2)
stream_choices = st.fixed_dictionaries(
    {"index": st.integers(0, 1), "delta": deltas, "finish_reason": st.sampled_from([None, None, None, "stop"])},
    optional={
        "token_ids": st.lists(st.integers(0, 9), max_size=2),
        "logprobs": st.one_of(st.none(), st.fixed_dictionaries({"content": st.one_of(st.none(), stream_entries)})),
        "unheard_of": st.just(1),
        "stop_reason": st.none(),
    },
)
chunks = st.fixed_dictionaries(
    {**{name: st.just(value) for name, value in HEAD.items()}, "choices": st.lists(stream_choices, max_size=2)},
    optional={
        "usage": st.sampled_from([None, {"total_tokens": 3}]),
        "prompt_token_ids": st.lists(st.integers(0, 9), max_size=2),
        "system_fingerprint": st.sampled_from([None, "f"]),
    },
)


def rebuilt(pieces, split=None):
    """The answer of a stream that comes in these pieces, or the error that it ends with."""
    decoder = SSEDecoder() if split is None else SSEDecoder(split)
    answer = ChatStream()
    try:
        for piece in pieces:
            for chunk in parse_events(decoder.feed(piece), logprob_details=False):
                answer.feed(chunk)
    except (UpstreamError, TokenMismatchError) as error:
        return type(error), str(error).partition(":")[0]  # behind it is a position
    return as_lists(answer.response())


@given(st.lists(chunks, max_size=8), spacing, st.data())
def test_a_stream_is_rebuilt_alike(stream, separators, data):
    separators = tuple(separator.replace("\n", " ") for separator in separators)
    ends = st.sampled_from([b"\n\n"] * 6 + [b"\r\n\r\n", b"\n: comment\n\n"])
    text = b"".join(
        b"data: "
        + json.dumps(chunk, separators=separators, ensure_ascii=data.draw(st.booleans())).encode(errors="surrogatepass")
        + data.draw(ends)
        for chunk in stream
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert rebuilt(pieces, split_events) == rebuilt(pieces)


def text_event(text, token_id, **changed):
    choice = {
        "index": 0,
        "delta": {"content": text},
        "finish_reason": None,
        "token_ids": [token_id],
        "logprobs": {"content": [ENTRY]},
    }
    return b"data: " + json.dumps({**HEAD, "choices": [{**choice, **changed}]}).encode()


def test_text_that_arrived_together_is_one_chunk():
    events = [
        text_event('a"', 1),
        text_event("ü\n", 2),
        text_event("c", 3, index=1),
        text_event("d", 4, logprobs=None),
        b"data: [DONE]",
    ]
    *merged, done = split_events(b"\n\n".join(events))
    assert done == b"[DONE]"
    [first, second, third] = parse_events(merged, logprob_details=False)
    assert first == {
        **HEAD,
        "choices": [
            {
                "index": 0,
                "delta": {"content": 'a"ü\n'},
                "logprobs": {"token_logprobs": array("d", [-0.5, -0.5])},
                "finish_reason": None,
                "token_ids": array("I", [1, 2]),
            }
        ],
    }
    assert second["choices"][0]["index"] == 1
    assert third["choices"][0]["logprobs"] is None


def test_the_prompt_of_a_stream_is_an_array():
    opening = {
        **HEAD,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": [1, 2],
    }
    [chunk] = parse_events(split_events(b"data: " + json.dumps(opening).encode()), logprob_details=False)
    assert chunk == {**opening, "prompt_token_ids": array("I", [1, 2])}


def test_a_character_that_two_events_share_is_refused():
    halves = [text_event("xx", 1).replace(b'"xx"', b'"%s"' % half) for half in (b"\xf0\x9f", b"\x98\x80")]
    with pytest.raises(UpstreamError, match="an event that is not JSON"):
        parse_events(split_events(b"\n\n".join(halves)), logprob_details=False)


@pytest.mark.parametrize("text", ["\U0001f600", "ü", "\uffff", "a", ""])
def test_whole_characters_are_merged(text):
    event = text_event("xx", 1).replace(b'"xx"', b'"%s"' % text.encode())
    [chunk] = parse_events(split_events(b"\n\n".join([event, event])), logprob_details=False)
    assert chunk["choices"][0]["delta"]["content"] == 2 * text


def test_an_answer_without_a_token_is_told_as_such():
    text = text_event("a", 1, token_ids=[], logprobs=None)
    answer = ChatStream()
    for chunk in parse_events(split_events(text), logprob_details=False):
        answer.feed({**chunk, "prompt_token_ids": [1]})
    response = answer.response()
    assert tokens_of_choice(response, response["choices"][0], 0).problem == "choices[0] holds no sampled token"


def test_arrays_are_told_like_lists():
    choice = {"token_ids": array("I", range(9)), "logprobs": {"token_logprobs": array("d", [-1.0])}}
    with pytest.raises(TokenMismatchError, match=r"has 9 ids \(\[0, 1, 2, 3, \.\.\.\]\) .* has 1 entries \(\[-1.0\]\)"):
        tokens_of_choice({"prompt_token_ids": [1]}, choice, 0)


@pytest.mark.parametrize(
    "text",
    [b"event: x\ndata: {}", b"data:{}", b": comment", b"data: {}\n\n\ndata: {}", b"data: {}\r\n\r\ndata: {}", b"x"],
)
def test_other_lines_than_data_are_left_to_python(text):
    assert split_events(text) is None


def test_tokens_that_came_in_arrays_and_lists_are_checked_like_others():
    answer = ChatStream()
    for ids, numbers in ((array("I", [1]), array("d", [-1.0])), ([2], [0.5])):
        choice = {"index": 0, "delta": {}, "token_ids": ids, "logprobs": {"token_logprobs": numbers}}
        answer.feed({"prompt_token_ids": [1], "choices": [{**choice, "finish_reason": None}]})
    response = answer.response()
    with pytest.raises(TokenMismatchError, match=r"content\[1\].logprob=0.5"):
        tokens_of_choice(response, response["choices"][0], 0)
