"""The calls of a session as a tree: which earlier call a prompt continues.

A call continues an earlier one if its prompt begins with all tokens of that call, prompt and answer. The longest such
call is its parent; of equally long ones, the latest. `Trace.parent_id` records the parent when the call is captured,
and everything that reads traces later follows it.

* `ParentIndex` finds parents while calls are captured; it keeps hashes instead of tokens.
* `parent_of` and `continues` compare the tokens themselves.
* `SessionTree` links the traces of a stored session.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rllm.types import Trace

_ID_BYTES = 4
_BYTES_PER_CALL = 400


class HasTokens(Protocol):
    """A call whose tokens are known: a `Trace` or a `Step`."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def response_ids(self) -> list[int]: ...


class CallNode(NamedTuple):
    """A call as a possible parent: enough to recognize its tokens at the beginning of a later prompt."""

    trace_id: str
    num_ids: int
    """Tokens of prompt and answer together."""
    last_id: bytes
    """The last of these tokens. It is compared first, which rules out nearly all other prompts."""
    ids_hash: int
    """64 bits of SipHash with this process's own key: one pair in 10^19 collides by chance, and none on purpose."""

    @classmethod
    def of(cls, trace_id: str, ids: bytes) -> CallNode:
        """Return the node of a call; `ids` are its prompt and its answer, four bytes each."""
        return cls(trace_id, len(ids) // _ID_BYTES, ids[-_ID_BYTES:], hash(ids))

    @classmethod
    def of_trace(cls, trace: Trace) -> CallNode | None:
        """Return the node of a trace; `None` if it has no sampled tokens, since no call can continue it."""
        if not trace.response_ids:
            return None
        return cls.of(trace.id, (array("I", trace.prompt_ids) + array("I", trace.response_ids)).tobytes())

    def precedes(self, prompt_ids: bytes) -> bool:
        """Return whether a prompt, four bytes for each id, begins with all tokens of this call."""
        size = _ID_BYTES * self.num_ids
        return (
            prompt_ids[size - _ID_BYTES : size] == self.last_id
            and len(prompt_ids) >= size
            and hash(prompt_ids[:size]) == self.ids_hash
        )


@dataclass(slots=True)
class ParentIndex:
    """Finds the parents of new calls of one session, with some hundred bytes for each earlier call."""

    num_bytes: int = 0
    """Approximate size in memory."""
    _by_end: dict[tuple[int, bytes], dict[int, str]] = field(default_factory=dict)
    """Trace ids by the number of tokens and the last one, then by the hash of all."""

    def add(self, node: CallNode | None) -> None:
        """Remember a call; `None` is ignored."""
        if node is not None:
            self._by_end.setdefault((node.num_ids, node.last_id), {})[node.ids_hash] = node.trace_id
            self.num_bytes += _BYTES_PER_CALL

    def parent_of(self, prompt_ids: array[int]) -> str | None:
        """Return the id of the call that a prompt continues."""
        prompt = prompt_ids.tobytes()
        ends = [
            (num_ids, by_hash)
            for (num_ids, last_id), by_hash in self._by_end.items()
            if prompt[_ID_BYTES * (num_ids - 1) : _ID_BYTES * num_ids] == last_id
        ]
        for num_ids, by_hash in sorted(ends, key=lambda end: end[0], reverse=True):
            parent = by_hash.get(hash(prompt[: _ID_BYTES * num_ids]))
            if parent is not None:
                return parent
        return None


def packed_ids(ids: object) -> array[int] | None:
    """Return token ids in four bytes each; `None` if these are not token ids, which capture reports."""
    try:
        return array("I", ids) if isinstance(ids, list | array) else None
    except (OverflowError, TypeError):
        return None


def begins_with(ids: Sequence[int], known: array[int]) -> bool:
    """Return whether token ids begin with the known ones."""
    return array("I", ids[: len(known)]).tobytes() == known.tobytes()  # arrays are compared number by number


def continues(prompt_ids: Sequence[int], earlier: HasTokens) -> bool:
    """Return whether a prompt begins with all tokens of an earlier call."""
    cut = len(earlier.prompt_ids)
    size = cut + len(earlier.response_ids)
    # The last token is compared first: it rules out most calls without copying a slice.
    return (
        bool(earlier.response_ids)
        and size <= len(prompt_ids)
        and prompt_ids[size - 1] == earlier.response_ids[-1]
        and prompt_ids[cut:size] == earlier.response_ids
        and prompt_ids[:cut] == earlier.prompt_ids
    )


def parent_of(prompt_ids: Sequence[int], earlier: Sequence[Trace]) -> str | None:
    """Return the id of the call that a prompt continues, among calls in the order in which they were made."""
    candidates = [trace for trace in reversed(earlier) if continues(prompt_ids, trace)]
    longest = max(candidates, key=lambda trace: len(trace.prompt_ids) + len(trace.response_ids), default=None)
    return longest.id if longest else None


class SessionTree:
    """Traces of one session, linked by `Trace.parent_id`. Traces without usable tokens are not part of it."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = {trace.id: trace for trace in traces if trace.response_ids and trace.error is None}
        self._parents: dict[str, Trace | None] = {}
        """Parents found so far, so that their tokens are compared only once."""

    def parent(self, trace: Trace) -> Trace | None:
        """Return the call that a trace continues."""
        if trace.id not in self._parents:
            parent = self._traces.get(trace.parent_id or "")
            # A trace may have been replaced since, and a store of unknown origin may claim anything.
            is_parent = parent is not None and continues(trace.prompt_ids, parent)
            self._parents[trace.id] = parent if is_parent else None
        return self._parents[trace.id]

    def path_to(self, trace: Trace) -> list[Trace]:
        """Return the calls that lead to a trace, the first one first, and the trace itself."""
        path = [trace]
        while (parent := self.parent(path[-1])) is not None:
            path.append(parent)
        return path[::-1]

    def leaves(self) -> list[Trace]:
        """Return the calls that no other call continues: the ends of the session's token sequences."""
        parents = {parent.id for parent in map(self.parent, self._traces.values()) if parent is not None}
        return [trace for trace in self._traces.values() if trace.id not in parents]
