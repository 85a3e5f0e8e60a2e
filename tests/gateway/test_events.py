import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import ChatStream
from rllm.errors import TokenMismatchError
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.answers import parse_events

HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}

deltas = st.one_of(
    st.fixed_dictionaries({"content": st.text(max_size=3)}),
    st.sampled_from([{}, {"role": "assistant", "content": ""}, {"reasoning_content": "r"}, {"content": None}]),
    st.just({"content": "x", "tool_calls": None}),
)
entries = st.lists(st.fixed_dictionaries({"logprob": st.floats(-9, 0)}), max_size=2)
choices = st.fixed_dictionaries(
    {"index": st.integers(0, 1), "delta": deltas, "finish_reason": st.sampled_from([None, None, None, "stop"])},
    optional={
        "token_ids": st.lists(st.integers(0, 9), max_size=2),
        "logprobs": st.one_of(st.none(), st.fixed_dictionaries({"content": st.one_of(st.none(), entries)})),
        "unknown_field": st.just(1),
    },
)
chunks = st.fixed_dictionaries(
    {**{name: st.just(value) for name, value in HEAD.items()}, "choices": st.lists(choices, max_size=2)},
    optional={
        "usage": st.sampled_from([None, {"total_tokens": 3}]),
        "prompt_token_ids": st.just([1]),
        "system_fingerprint": st.just("f"),
    },
)


def rebuilt(chunks):
    answer = ChatStream()
    for chunk in chunks:
        answer.feed(chunk)
    return answer.response()


@given(st.lists(chunks, max_size=8), st.booleans())
def test_merged_chunks_rebuild_the_same_answer(stream, logprob_details):
    payloads = [json.dumps(chunk).encode() for chunk in stream]
    parsed = parse_events(payloads, logprob_details=logprob_details)
    try:
        whole = with_bare_logprobs(rebuilt(stream))
    except TokenMismatchError as error:
        with pytest.raises(TokenMismatchError, match=re.escape(str(error))):
            rebuilt(parsed)
    else:
        assert with_bare_logprobs(rebuilt(parsed)) == whole


def with_bare_logprobs(answer):
    """Return the answer with a list of numbers for the log-probabilities of each choice, from any of its forms."""
    for choice in answer["choices"]:
        given = choice["logprobs"] or {}
        bare = [entry["logprob"] for entry in given.get("content", ())]
        choice["logprobs"] = given.get("token_logprobs", []) + bare
    return answer


def text_event(text, token_id, index=0):
    entry = {"token": text, "logprob": -0.5, "bytes": [1], "top_logprobs": []}
    choice = {"index": index, "delta": {"content": text}, "finish_reason": None, "token_ids": [token_id]}
    return json.dumps({**HEAD, "choices": [{**choice, "logprobs": {"content": [entry]}}]}).encode()


def test_text_that_arrives_together_is_one_chunk():
    events = [text_event("a", 1), text_event("b", 2), text_event("c", 3), text_event("d", 4, index=1)]
    merged, other = parse_events(events, logprob_details=False)
    assert merged["choices"][0]["delta"] == {"content": "abc"}
    assert merged["choices"][0]["token_ids"] == [1, 2, 3]
    assert merged["choices"][0]["logprobs"] == {"token_logprobs": [-0.5] * 3}
    assert other["choices"][0]["delta"] == {"content": "d"}


def test_details_are_kept_on_request():
    parsed = parse_events([text_event("a", 1), text_event("b", 2)], logprob_details=True)
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in parsed] == ["a", "b"]


@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("payload", [b"{", b"[1]", b"null", b"\xff"])
def test_event_that_is_not_a_json_object_is_rejected(payload, details):
    with pytest.raises(UpstreamError, match="an event that is not"):
        parse_events([payload], logprob_details=details)


def test_text_that_is_not_utf8_is_rejected():
    with pytest.raises(UpstreamError, match="an event that is not JSON"):
        parse_events([text_event("a", 1).replace(b'"a"', b'"\xed\xa0\xbd"')], logprob_details=False)


def test_ids_in_token_texts_are_kept():
    entry = {"token": "token_id:7", "logprob": -0.5}
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": {"content": [entry]}}
    event = json.dumps({**HEAD, "choices": [choice]}).encode()
    [chunk] = parse_events([event], logprob_details=False)
    assert chunk["choices"][0]["logprobs"] == {"content": [entry]}
