"""Which earlier call of a session a prompt continues, found by hashes of token prefixes instead of the tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from rllm.capture.tokens import TokenIds
from rllm.types import Trace

_CALL_BYTES = 400


class Lineage:
    """The same answer as `rllm.capture.parent_of`, with some hundred bytes kept for each call instead of all its tokens."""

    def __init__(self) -> None:
        self._by_end: dict[tuple[int, int], dict[int, str]] = {}
        """By the number of a call's tokens and the last of them, which rules out nearly all other prompts; then by their hash."""
        self.num_bytes = 0
        """About what it takes in memory."""

    def add(self, trace: Trace) -> None:
        """Remember a call as a possible parent; one without tokens cannot be continued."""
        self.adding(trace)()

    def adding(self, trace: Trace) -> Callable[[], None]:
        """`add` for later, which has no hold of the trace."""
        if not trace.response_ids:
            return _nothing
        tokens = array("I", trace.prompt_ids)
        tokens.extend(trace.response_ids)
        return partial(self._add, (len(tokens), tokens[-1]), hash(tokens.tobytes()), trace.id)

    def _add(self, end: tuple[int, int], tokens_hash: int, trace_id: str) -> None:
        self._by_end.setdefault(end, {})[tokens_hash] = trace_id
        self.num_bytes += _CALL_BYTES

    def parent_of(self, prompt_ids: TokenIds) -> str | None:
        """The call whose prompt and answer are the longest token prefix of this prompt; of equal ones, the latest. What are no ids
        go on from nothing: they are told apart later."""
        known = len(prompt_ids)
        ends = [end for end in self._by_end if end[0] <= known and prompt_ids[end[0] - 1] == end[1]]
        for end in sorted(ends, reverse=True):
            try:
                beginning = array("I", prompt_ids[: end[0]])
            except (OverflowError, TypeError):
                return None
            parent = self._by_end[end].get(hash(beginning.tobytes()))
            if parent is not None:
                return parent
        return None


def _nothing() -> None:
    """Nothing goes on from an answer without tokens."""
