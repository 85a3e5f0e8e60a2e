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
    run: _Run | None = None
    for chunk in chunks:
        if run is not None and run.takes(chunk):
            continue
        if run is not None:
            run.close()
        run = _Run(chunk) if _is_plain(chunk) else None
        kept.append(chunk)
    if run is not None:
        run.close()
    return kept


def _is_plain(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries text of one choice, its tokens, and nothing else."""
    choices = chunk.get("choices")
    if type(choices) is not list or len(choices) != 1 or not chunk.keys() <= _HEAD:
        return False
    choice = choices[0]
    return type(choice) is dict and choice.keys() <= _CHOICE and "index" in choice and _text_of(choice) is not None


def _text_of(choice: dict[str, Any]) -> str | None:
    """The text of a choice whose delta is nothing but text, and which has not ended."""
    delta = choice.get("delta")
    if type(delta) is not dict or len(delta) != 1 or choice.get("finish_reason") or choice.get("stop_reason"):
        return None
    text = delta.get("content")
    return text if type(text) is str else None


class _Run:
    """Plain chunks of one choice and one shape, gathered in the first of them."""

    __slots__ = ("_choice", "_entries", "_head", "_ids", "_shape", "_texts")

    def __init__(self, chunk: dict[str, Any]) -> None:
        self._choice = chunk["choices"][0]
        self._head, self._shape = tuple(chunk), tuple(self._choice)
        self._texts = [self._choice["delta"]["content"]]
        self._ids = self._choice.get("token_ids")
        self._entries = _entries_of(self._choice)

    def takes(self, chunk: dict[str, Any]) -> bool:
        """Append this chunk, if it goes on in the same way: the same members in the same order, of the same kinds."""
        choices = chunk.get("choices")
        if not choices or len(choices) != 1 or tuple(chunk) != self._head:
            return False
        choice = choices[0]
        if type(choice) is not dict or tuple(choice) != self._shape or choice["index"] != self._choice["index"]:
            return False
        text, ids, entries = _text_of(choice), choice.get("token_ids"), _entries_of(choice)
        if text is None or type(ids) is not type(self._ids) or type(entries) is not type(self._entries):
            return False
        self._texts.append(text)
        if ids:
            self._ids += ids
        if entries:
            self._entries += entries
        return True

    def close(self) -> None:
        self._choice["delta"]["content"] = "".join(self._texts)


def _entries_of(choice: dict[str, Any]) -> Any:
    logprobs = choice.get("logprobs")
    return logprobs.get("content") if logprobs else None
