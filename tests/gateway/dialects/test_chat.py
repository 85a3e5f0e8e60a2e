"""Chunks of a chat completion on their way to a client: some are held back for the end, and none is lost."""

import json

import pytest

from rllm.capture import ChatStream
from rllm.gateway.dialects.chat import ChatStreamEncoder, CompletionsStreamEncoder

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chunk(delta, reason=None, **more):
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": more.pop("logprobs", None)}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


def entry(logprob):
    return {"token": "x", "logprob": logprob, "bytes": None, "top_logprobs": []}


def sent_chunks(encoder, *chunks):
    """Return the chunks that a client receives at once, and those at the end."""
    whole = ChatStream()
    for one in chunks:
        whole.feed(one)
    now, later = (
        [json.loads(line[6:]) for line in piece.decode().splitlines() if line.startswith("data: {")]
        for piece in (encoder.feed(list(chunks)), encoder.finish(whole.response()))
    )
    return now, later


@pytest.mark.parametrize("kind", [ChatStreamEncoder, CompletionsStreamEncoder])
@pytest.mark.parametrize("wanted", [True, False])
def test_usage_is_in_the_last_chunk(kind, wanted):
    so_far = chunk({"content": "h"}, usage={**USAGE, "completion_tokens": 1})
    asked = {"prompt": "p", "stream_options": {"include_usage": wanted}}
    now, later = sent_chunks(kind(asked), so_far, chunk({"content": "i"}, "stop", usage=USAGE))
    assert not any("usage" in event for event in now)
    assert later[0]["choices"][0]["finish_reason"] == "stop"
    assert [(event["choices"], event["usage"]) for event in later[1:]] == ([([], USAGE)] if wanted else [])


def test_logprob_of_the_end_token_is_included():
    last = chunk({"content": ""}, "stop", logprobs={"content": [entry(-0.25)]})
    now, [ending] = sent_chunks(ChatStreamEncoder({"logprobs": True}), chunk({"content": "h"}), last)
    assert [event["choices"][0]["logprobs"] for event in now] == [None, {"content": [entry(-0.25)]}]
    assert now[1]["choices"][0]["finish_reason"] is None
    assert (ending["choices"][0]["finish_reason"], ending["choices"][0]["delta"]) == ("stop", {})
