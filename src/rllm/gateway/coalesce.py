"""One chunk in the place of many that arrived together: work for each network read instead of each token."""

from __future__ import annotations

from typing import Any

_HEAD = {"id", "object", "created", "model", "choices", "system_fingerprint", "service_tier"}
_CHOICE = {"index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"}


def coalesced(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same stream with runs of plain text deltas of one choice merged; it may change and reuse what it is given.

    A client cannot tell: the network merges events as it likes. Chunks that say anything but text and its tokens stay as
    they are, and so does the order.
    """
    if len(chunks) < 2:
        return chunks
    kept: list[dict[str, Any]] = []
    texts: list[str] = []
    first: dict[str, Any] | None = None
    for chunk in chunks:
        choice = _plain_choice(chunk)
        if choice is not None and first is not None and _extend(first, choice):
            texts.append(choice["delta"]["content"])
            continue
        if first is not None:
            first["delta"]["content"] = "".join(texts)
        kept.append(chunk)
        first = choice
        texts = [] if choice is None else [choice["delta"]["content"]]
    if first is not None:
        first["delta"]["content"] = "".join(texts)
    return kept


def _plain_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The one choice of a chunk that carries nothing but text and its tokens."""
    choices = chunk.get("choices")
    if type(choices) is not list or len(choices) != 1 or not chunk.keys() <= _HEAD:
        return None
    choice = choices[0]
    if type(choice) is not dict or not choice.keys() <= _CHOICE or choice.get("finish_reason") is not None:
        return None
    delta = choice.get("delta")
    if type(delta) is not dict or len(delta) != 1 or type(delta.get("content")) is not str:
        return None
    return choice


def _extend(first: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Append a choice's tokens to those of the first of its run; `False` if they do not belong or do not look alike."""
    if first.get("index") != choice.get("index"):
        return False
    ids, more_ids = first.get("token_ids"), choice.get("token_ids")
    logprobs, more_logprobs = first.get("logprobs"), choice.get("logprobs")
    if type(ids) is not type(more_ids) or type(logprobs) is not type(more_logprobs):
        return False
    if logprobs is not None and more_logprobs is not None:
        entries, more_entries = logprobs.get("content"), more_logprobs.get("content")
        if type(entries) is not list or type(more_entries) is not list:
            return False
        entries += more_entries
    if ids is not None and more_ids is not None:
        ids += more_ids
    return True
