"""Events of a stream as chunks. Those that only carry text are merged: work for each network read, not for each token.

Nearly every event of a stream carries only text and tokens. Such events are decoded straight into four values, without
a dictionary for every token, and those that arrived together become one chunk: the network merges events as it likes
anyway. Any other event is parsed as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rllm._runtime.untrusted import parse_json
from rllm.capture import has_labels
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.answers import MAX_ANSWER_VALUE_BYTES, check_answer
from rllm.types import JSONObject


def parse_events(events: Sequence[bytes], *, logprob_details: bool) -> list[JSONObject]:
    """Return the chunks of these events, in order.

    Args:
        events: data of server-sent events, one JSON object each.
        logprob_details: keep token texts and alternatives. Otherwise the bare numbers are in `logprobs.token_logprobs`.

    Raises:
        UpstreamError: if one of them is not a JSON object, or a field of it has another type than it should.
    """
    if logprob_details:
        return [_parse(payload) for payload in events]
    chunks: list[JSONObject] = []
    runs: list[_Run] = []
    run: _Run | None = None
    for payload in events:
        try:
            text_chunk = _decode_text_chunk(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            run = None
            chunks.append(_with_bare_logprobs(_parse(payload)))
            continue
        choice = text_chunk.choices[0]
        logprobs = choice.logprobs
        if run is None or choice.index != run.index or (logprobs is None) is not run.is_bare:
            run = _Run(text_chunk)
            runs.append(run)
            chunks.append(run.chunk)
        # Taken out at once, so that the next event finds its memory where this one's was.
        run.texts.append(choice.delta.content)
        run.ids += choice.token_ids
        if logprobs is not None:
            for entry in logprobs.content:
                run.numbers.append(entry.logprob)
    for run in runs:
        run.delta["content"] = "".join(run.texts)
    return chunks


def _loads(payload: bytes) -> Any:
    try:
        return parse_json(payload, limit=MAX_ANSWER_VALUE_BYTES)
    except ValueError as error:
        raise UpstreamError(f"the upstream's stream holds an event that is not JSON: {error}") from error


def _parse(payload: bytes) -> JSONObject:
    chunk = _loads(payload)
    if not isinstance(chunk, dict):
        raise UpstreamError(f"the upstream's stream holds an event that is not a JSON object: {payload[:80]!r}")
    if not chunk.get("error"):
        check_answer(chunk)
    return chunk


def _with_bare_logprobs(chunk: JSONObject) -> JSONObject:
    """Return the chunk with bare log-probabilities, as merged ones have, unless ids must be read from their texts."""
    for choice in chunk.get("choices") or ():
        entries = (choice.get("logprobs") or {}).get("content")
        if entries is None or (choice.get("token_ids") is None and has_labels(entries)):
            continue
        numbers = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
        choice["logprobs"] = {"token_logprobs": numbers}
    return chunk


class _Run:
    """Text chunks of one choice that follow each other, as one."""

    __slots__ = ("chunk", "delta", "ids", "index", "is_bare", "numbers", "texts")

    def __init__(self, first: _TextChunk) -> None:
        [choice] = first.choices
        self.index = choice.index
        self.is_bare = choice.logprobs is None
        """True if its events have no log-probabilities."""
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.numbers: list[float] = []
        self.delta: dict[str, str] = {}
        self.chunk: JSONObject = {
            "id": first.id,
            "object": first.object,
            "created": first.created,
            "model": first.model,
            "choices": [
                {
                    "index": self.index,
                    "delta": self.delta,
                    "logprobs": None if self.is_bare else {"token_logprobs": self.numbers},
                    "finish_reason": None,
                    "token_ids": self.ids,
                }
            ],
        }
        if first.system_fingerprint is not None:
            self.chunk["system_fingerprint"] = first.system_fingerprint


# What a text chunk may hold. Anything else, and anything but null where null is expected, makes it an ordinary chunk.


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry]


class _TextDelta(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str
    role: None = None
    refusal: None = None
    reasoning: None = None
    reasoning_content: None = None
    tool_calls: None = None


class _TextChoice(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    index: int
    delta: _TextDelta
    token_ids: list[int]
    """Without them the ids may stand in the texts of the log-probabilities, which are not kept here."""
    logprobs: _Logprobs | None = None
    finish_reason: None = None
    stop_reason: None = None
    matched_stop: None = None


class _TextChunk(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_TextChoice]
    system_fingerprint: str | None = None
    usage: None = None


_decode_text_chunk = msgspec.json.Decoder(_TextChunk).decode
