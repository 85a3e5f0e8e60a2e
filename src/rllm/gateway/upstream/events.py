"""The events of a stream as chunks, those that only carry text merged: work for each network read, not for each token.

Nearly every event of a stream says one thing: this much more text, these tokens. Such events are decoded straight into
four values, without a dictionary for every token, and those that arrived together become one chunk. Clients cannot tell,
since the network merges events as it likes. Any other event is parsed as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from rllm.capture import has_labels
from rllm.gateway.errors import UpstreamError


def parse_events(payloads: list[bytes], *, logprob_details: bool) -> list[dict[str, Any]]:
    """The chunks of these payloads, in order.

    Args:
        payloads: the data of server-sent events, one JSON object each.
        logprob_details: whether token texts and alternatives are wanted beside the log-probabilities. Where they are not,
            the bare numbers stand in `logprobs.token_logprobs`.

    Raises:
        UpstreamError: if one of them is not a JSON object.
    """
    if logprob_details:
        return [_parse(payload) for payload in payloads]
    chunks: list[dict[str, Any]] = []
    run: list[_TextChunk] = []
    for payload in payloads:
        try:
            text_chunk = _decode_text_chunk(payload)
        except msgspec.MsgspecError:
            if run:
                chunks.append(_merged(run))
                run = []
            chunks.append(_with_bare_logprobs(_parse(payload)))
            continue
        if run and not _go_on(text_chunk.choices[0], run[0].choices[0]):
            chunks.append(_merged(run))
            run = []
        run.append(text_chunk)
    if run:
        chunks.append(_merged(run))
    return chunks


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(payload)
    except ValueError as error:
        raise UpstreamError(f"the upstream's stream holds an event that is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise UpstreamError(f"the upstream's stream holds an event that is not a JSON object: {payload[:80]!r}")
    return chunk


def _with_bare_logprobs(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk with its log-probabilities in the form that merging gives them, unless ids must be read from their texts."""
    for choice in chunk.get("choices") or ():
        entries = (choice.get("logprobs") or {}).get("content")
        if entries is None or (choice.get("token_ids") is None and has_labels(entries)):
            continue
        numbers = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
        choice["logprobs"] = {"token_logprobs": numbers}
    return chunk


def _go_on(choice: _TextChoice, before: _TextChoice) -> bool:
    """Whether a choice goes on where another one is, with the same fields."""
    return choice.index == before.index and (choice.logprobs is None) is (before.logprobs is None)


def _merged(run: list[_TextChunk]) -> dict[str, Any]:
    """Text chunks of one choice as one."""
    first = run[0]
    choices = [chunk.choices[0] for chunk in run]
    numbers = [entry.logprob for choice in choices if choice.logprobs is not None for entry in choice.logprobs.content]
    merged: dict[str, Any] = {
        "id": first.id,
        "object": first.object,
        "created": first.created,
        "model": first.model,
        "choices": [
            {
                "index": choices[0].index,
                "delta": {"content": "".join([choice.delta.content for choice in choices])},
                "logprobs": None if choices[0].logprobs is None else {"token_logprobs": numbers},
                "finish_reason": None,
                "token_ids": [token_id for choice in choices for token_id in choice.token_ids],
            }
        ],
    }
    if first.system_fingerprint is not None:
        merged["system_fingerprint"] = first.system_fingerprint
    return merged


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
