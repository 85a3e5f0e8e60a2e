"""What a trace has in common with an earlier one of its session: left out when it is written, put back when it is read.

A conversation's prompt begins with the prompt and the answer of the turn before, so that without this a session of n turns
would take room in proportion to n squared. The rule: a trace leaves out only what is equal, and only where the transaction
that writes it finds the other one stored with that very content. What was written is remembered by hashes alone, so that a
process which runs for weeks stays small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rllm.store.codec import (
    ids_to_bytes,
    pack_document,
    pack_floats,
    pack_json,
    pack_wide_ids,
    to_json,
    unpack_sized_document,
)
from rllm.types import Trace

HEAD = (
    "session_id",
    "id",
    "call_id",
    "choice_index",
    "parent_id",
    "model",
    "finish_reason",
    "weight_version",
    "template_hash",
    "logprobs_kind",
    "started_at",
    "error",
)
"""The fields of text and numbers, each of which has a column of its own."""
_head_of = attrgetter(*HEAD)
_REPEATED = ("tools", "sampling", "requested_sampling", "metadata")
"""Fields of the document that turns often have in common as a whole."""
_OWN = ("response", "timings", "weight_updates")
_DEFAULTS: dict[str, Any] = {"tools": None, "weight_updates": []} | {
    name: {} for name in ("sampling", "requested_sampling", "metadata", "timings")
}
_SHARED = "shared"
"""Where the document of a trace says what it has in common with its base: numbers of tokens and messages, and fields."""
_HASH_BYTES = 8
_SESSIONS_KNOWN = 4096
_TURNS_KNOWN = 8
"""Traces of a session that are remembered: the latest, which later ones continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What is remembered of a trace that was written: enough to recognise what a later one repeats."""

    session_id: str
    id: str
    digest: bytes
    """Of everything that a later trace may leave out."""
    num_prompt_ids: int
    num_ids: int
    """Of prompt and answer together."""
    prompt_hash: bytes
    ids_hash: bytes
    message_hashes: bytes
    """`_HASH_BYTES` for each message of the prompt, and for the answer."""
    field_hashes: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A trace as bytes, so that later changes to its messages cannot reach it, and none of its objects is held; what others
    have too is still in it."""

    head: tuple[Any, ...]
    """The values of `HEAD`."""
    prompt: bytes
    response: bytes
    """Token ids, 4 bytes each."""
    logprobs: bytes
    messages: Sequence[bytes] = ()
    fields: Mapping[str, bytes] = field(default_factory=dict)
    """The document as JSON: each message, and each other field."""
    document: bytes | None = None
    """The whole document, packed, where JSON cannot hold it as it is: nothing is left out of it, or builds upon it."""

    @property
    def session_id(self) -> str:
        session_id: str = self.head[0]
        return session_id

    @property
    def id(self) -> str:
        trace_id: str = self.head[1]
        return trace_id

    @property
    def parent_id(self) -> str | None:
        parent_id: str | None = self.head[4]
        return parent_id


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTrace:
    """A trace ready to be written."""

    draft: Draft
    base: Turn | None
    """The trace without which this one cannot be read; `None`: it stands alone."""
    turn: Turn | None
    """What to remember of it; `None` for one that nothing builds upon."""
    prompt_ids: bytes
    response_ids: bytes
    document: bytes

    @property
    def digest(self) -> bytes | None:
        return self.turn.digest if self.turn else None


@dataclass(slots=True)
class KnownTurns:
    """The latest turns of the sessions in use. Only the writer's thread asks."""

    _sessions: OrderedDict[str, OrderedDict[str, Turn]] = field(default_factory=OrderedDict)

    def base_of(self, draft: Draft) -> Turn | None:
        """The turn that this trace continues, else the latest of its session."""
        turns = self._sessions.get(draft.session_id)
        if not turns:
            return None
        return turns.get(draft.parent_id or "") or next(reversed(turns.values()))

    def learn(self, packed: Iterable[PackedTrace]) -> None:
        """Remember traces as the latest of their sessions."""
        for turn in (item.turn for item in packed):
            if turn is not None:
                self._learn(turn)

    def _learn(self, turn: Turn) -> None:
        turns = self._sessions.setdefault(turn.session_id, OrderedDict())
        self._sessions.move_to_end(turn.session_id)
        turns[turn.id] = turn
        turns.move_to_end(turn.id)
        if len(turns) > _TURNS_KNOWN:
            turns.popitem(last=False)
        if len(self._sessions) > _SESSIONS_KNOWN:
            self._sessions.popitem(last=False)


def draft_of(trace: Trace) -> Draft:
    """Everything of a trace that could still be changed, as bytes.

    Raises:
        StoreError: if its token ids are none.
    """
    prompt, response = ids_to_bytes(trace.prompt_ids), ids_to_bytes(trace.response_ids)
    logprobs = pack_floats(trace.logprobs)
    try:
        messages = [to_json(message) for message in trace.messages]
        fields = {name: to_json(value) for name, value in _fields_of(trace).items()}
    except (TypeError, ValueError, RecursionError):
        document = pack_document({"messages": trace.messages, **_fields_of(trace)})
        return Draft(head=_head_of(trace), prompt=prompt, response=response, logprobs=logprobs, document=document)
    return Draft(
        head=_head_of(trace), prompt=prompt, response=response, logprobs=logprobs, messages=messages, fields=fields
    )


def pack(draft: Draft, base: Turn | None = None) -> PackedTrace:
    """The trace without what it has in common with `base`; whole where that is `None`."""
    turn, num_ids = None, 0
    if draft.document is not None:
        document, base = draft.document, None
    else:
        turn = _turn_of(draft)
        num_ids, num_messages, same = _in_common(turn, base, draft.prompt) if base else (0, 0, [])
        if not (num_ids or num_messages or "tools" in same):
            base, same = None, []  # to depend on another trace has to pay
        kept = {name: value for name, value in draft.fields.items() if name not in same}
        if base is not None:
            kept[_SHARED] = to_json([num_ids, num_messages, same])
        document = pack_json(_json_object(draft.messages[num_messages:], kept))
    return PackedTrace(
        draft=draft,
        base=base,
        turn=turn,
        prompt_ids=pack_wide_ids(draft.prompt[4 * num_ids :]),
        response_ids=pack_wide_ids(draft.response),
        document=document,
    )


def _json_object(messages: Sequence[bytes], fields: Mapping[str, bytes]) -> bytes:
    members = [b'"messages":[' + b",".join(messages) + b"]"]
    members += [b'"%s":%s' % (name.encode(), value) for name, value in fields.items()]
    return b"{" + b",".join(members) + b"}"


def unpack_document_of(blob: bytes, base: Trace | None) -> tuple[dict[str, Any], list[int], int]:
    """Return the document's fields of a trace, the prompt ids that its own follow, and the bytes of what was unpacked.

    Raises:
        LookupError: if it has something in common with a trace that is not given.
    """
    document: dict[str, Any]
    document, size = unpack_sized_document(blob)
    shared = document.pop(_SHARED, None)
    if shared is None:
        return document, [], size
    if base is None:
        raise LookupError("the trace that this one continues is missing")
    num_ids, num_messages, same = shared
    document["messages"] = [*base.messages, base.response][:num_messages] + document["messages"]
    document |= {name: getattr(base, name) for name in same}
    ids = base.prompt_ids if num_ids == len(base.prompt_ids) else base.prompt_ids + base.response_ids
    return document, ids if num_ids else [], size


def _fields_of(trace: Trace) -> dict[str, Any]:
    """The fields of the document that are not what `Trace` has anyway, without the messages."""
    values = {name: getattr(trace, name) for name in (*_OWN, *_REPEATED)}
    return {name: value for name, value in values.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _turn_of(draft: Draft) -> Turn:
    prompt_hash, ids_hash = _hash(draft.prompt), _hash(draft.prompt + draft.response)
    message_hashes = b"".join(map(_hash, [*draft.messages, draft.fields["response"]]))
    field_hashes = {name: _hash(draft.fields[name]) for name in _REPEATED if name in draft.fields}
    named_hashes = b"".join(name.encode() + value for name, value in field_hashes.items())
    return Turn(
        session_id=draft.session_id,
        id=draft.id,
        digest=_hash(prompt_hash + ids_hash + message_hashes + named_hashes),
        num_prompt_ids=len(draft.prompt) // 4,
        num_ids=(len(draft.prompt) + len(draft.response)) // 4,
        prompt_hash=prompt_hash,
        ids_hash=ids_hash,
        message_hashes=message_hashes,
        field_hashes=field_hashes,
    )


def _in_common(turn: Turn, base: Turn, prompt: bytes) -> tuple[int, int, list[str]]:
    """How many prompt ids and messages two turns begin with alike, and which fields are the same."""
    num_ids = 0
    if base.num_ids <= turn.num_prompt_ids and _hash(prompt[: 4 * base.num_ids]) == base.ids_hash:
        num_ids = base.num_ids
    elif turn.prompt_hash == base.prompt_hash:
        num_ids = turn.num_prompt_ids
    same = [name for name, value in turn.field_hashes.items() if base.field_hashes.get(name) == value]
    return num_ids, _num_alike(turn.message_hashes[:-_HASH_BYTES], base.message_hashes), same


def _num_alike(ours: bytes, theirs: bytes) -> int:
    end = min(len(ours), len(theirs))
    if ours[:end] == theirs[:end]:
        return end // _HASH_BYTES
    return next(
        start // _HASH_BYTES
        for start in range(0, end, _HASH_BYTES)
        if ours[start : start + _HASH_BYTES] != theirs[start : start + _HASH_BYTES]
    )


def _hash(value: bytes) -> bytes:
    """64 bits of SipHash, whose key is this process's own: nobody can make two values alike, and by chance one pair in 10^19
    is. Those of `hashlib` give up the interpreter's lock, and waiting for it takes longer than hashing."""
    return hash(value).to_bytes(_HASH_BYTES, "little", signed=True)
