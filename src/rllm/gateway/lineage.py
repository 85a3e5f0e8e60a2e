"""Which earlier call of a session a prompt continues, found by hashes of token prefixes instead of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rllm.types import Trace


class Lineage:
    """The same answer as `rllm.capture.parent_of`, with a hundred bytes kept for each call instead of all its tokens."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[int, str]] = {}

    def add(self, trace: Trace) -> None:
        """Remember a call as a possible parent; one without tokens cannot be continued."""
        self.adding(trace)()

    def adding(self, trace: Trace) -> Callable[[], None]:
        """`add` for later, which has no hold of the trace."""
        tokens = (*trace.prompt_ids, *trace.response_ids)
        return partial(self._add, len(tokens) if trace.response_ids else 0, hash(tokens), trace.id)

    def _add(self, length: int, tokens_hash: int, trace_id: str) -> None:
        if length:
            self._by_length.setdefault(length, {})[tokens_hash] = trace_id

    def parent_of(self, prompt_ids: list[int]) -> str | None:
        """The call whose prompt and answer are the longest token prefix of this prompt; of equal ones, the latest."""
        for length in sorted((length for length in self._by_length if length <= len(prompt_ids)), reverse=True):
            parent = self._by_length[length].get(hash(tuple(prompt_ids[:length])))
            if parent is not None:
                return parent
        return None
