"""Which earlier call of a session a prompt continues, found by hashes of token prefixes instead of the tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from rllm.types import Trace


class Lineage:
    """The same answer as `rllm.capture.parent_of`, with a hundred bytes kept for each call instead of all its tokens."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[int, str]] = {}

    def add(self, trace: Trace) -> None:
        """Remember a call as a possible parent; one without tokens cannot be continued."""
        if trace.response_ids:
            tokens = array("q", trace.prompt_ids)
            tokens.extend(trace.response_ids)
            self._by_length.setdefault(len(tokens), {})[hash(tokens.tobytes())] = trace.id

    def parent_of(self, prompt_ids: Sequence[int]) -> str | None:
        """The call whose prompt and answer are the longest token prefix of this prompt; of equal ones, the latest."""
        lengths = sorted((length for length in self._by_length if length <= len(prompt_ids)), reverse=True)
        if not lengths:
            return None
        tokens = array("q", prompt_ids)
        for length in lengths:
            parent = self._by_length[length].get(hash(tokens[:length].tobytes()))
            if parent is not None:
                return parent
        return None
