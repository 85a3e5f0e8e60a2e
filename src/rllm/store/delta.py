"""Traces as bytes, without the part that they share with an earlier trace of their session.

The prompt of a conversation's turn begins with the prompt and the answer of the turn before, so that without deltas a
session of n turns would take room in proportion to n squared. A trace that has a *base* is stored as "the first k ids
and m messages of the base, and these fields of it", followed by its own. Only content that is equal is left out, and
only if the writing transaction finds the base stored with exactly that content. Written traces are remembered by hashes
alone, so that a process that runs for weeks stays small.

`rllm.types.Trace` declares how each field is stored; everything here follows it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import takewhile
from operator import attrgetter, eq
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rllm.capture.session_tree import CallNode
from rllm.store.codec import ids_to_bytes, pack_document, pack_floats, pack_json, to_json, unpack_sized_document
from rllm.types import StepCredit, Trace

ColumnKind: TypeAlias = Literal["text", "integer", "real", "ids", "floats"]

_KINDS: dict[object, ColumnKind] = {
    str: "text",
    int: "integer",
    float: "real",
    list[int]: "ids",
    list[float]: "floats",
    Sequence[float]: "floats",
}
_DELTA = "shared"
"""Key of the document under which a trace lists what it takes from its base: numbers of ids and messages, and
fields."""
_HASH_BYTES = 8
_MAX_SESSIONS = 4096
_MAX_TRACES = 8
"""Traces of a session that are remembered: the latest ones, which later traces continue."""


@dataclass(frozen=True, slots=True)
class Column:
    """A field of a dataclass that has a column of its own."""

    name: str
    kind: ColumnKind


def columns_of(record: type, *, default: str = "column") -> tuple[Column, ...]:
    """Return the columns of a dataclass, without the session's id, which rows replace by its number."""
    hints = get_type_hints(record)
    return tuple(
        Column(item.name, _kind_of(hints[item.name]))
        for item in fields(record)
        if item.metadata.get("store", default) == "column" and item.name != "session_id"
    )


def _kind_of(hint: Any) -> ColumnKind:
    options = [option for option in get_args(hint) if option is not NoneType]
    if get_origin(hint) is Literal:
        return "text"
    return _KINDS[options[0] if NoneType in get_args(hint) else hint]


def _stored_as(kind: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(Trace) if item.metadata.get("store", "document") == kind)


_TRACE_COLUMNS = columns_of(Trace, default="document")
SCALARS = tuple(column for column in _TRACE_COLUMNS if column.kind not in ("ids", "floats"))
"""Columns of a trace with text and numbers."""
ARRAYS = tuple(column for column in _TRACE_COLUMNS if column not in SCALARS)
"""Columns of a trace with one number for each token."""
CREDIT_COLUMNS = columns_of(StepCredit)

_SHARED_FIELDS = _stored_as("shared")
_DOCUMENT_FIELDS = tuple(name for name in (*_stored_as("document"), *_SHARED_FIELDS) if name != "messages")
_DEFAULTS: dict[str, Any] = {
    item.name: item.default if item.default_factory is MISSING else item.default_factory() for item in fields(Trace)
}
_scalars_of = attrgetter(*(column.name for column in SCALARS))


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFingerprint:
    """Hashes of a written trace: enough to recognise what a later one repeats."""

    session_id: str
    node: CallNode
    digest: bytes
    """Hash of everything that a later trace may leave out."""
    prompt_hash: int
    num_prompt_ids: int
    message_hashes: array[int]
    """One for each message of the prompt, and one for the answer."""
    field_hashes: Mapping[str, int]

    @property
    def id(self) -> str:
        return self.node.trace_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """The part of a trace that is read from its base."""

    base: TraceFingerprint
    num_ids: int
    num_messages: int
    fields: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTrace:
    """A whole trace as bytes: later changes to its messages cannot reach it, and it holds none of their objects."""

    session_id: str
    id: str
    parent_id: str | None
    scalars: tuple[Any, ...]
    """Values of `SCALARS`."""
    arrays: Mapping[str, bytes]
    """Token ids as four bytes each, and floats as blobs."""
    messages: Sequence[bytes] = ()
    fields: Mapping[str, bytes] = field(default_factory=dict)
    """The document as JSON: each message, and each other field that differs from its default."""
    fingerprint: TraceFingerprint | None = None
    """`None` for a trace that cannot be a base or have one."""
    document: bytes | None = None
    """The document as a blob, if only the standard library can write it."""

    @classmethod
    def of(cls, trace: Trace) -> EncodedTrace:
        """Encode a trace.

        Raises:
            StoreError: if its token ids are not whole numbers of 32 bits.
        """
        encode = {"ids": ids_to_bytes, "floats": pack_floats}
        whole: dict[str, Any] = {
            "session_id": trace.session_id,
            "id": trace.id,
            "parent_id": trace.parent_id,
            "scalars": _scalars_of(trace),
            "arrays": {column.name: encode[column.kind](getattr(trace, column.name)) for column in ARRAYS},
        }
        values = {name: getattr(trace, name) for name in _DOCUMENT_FIELDS}
        values = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        try:
            messages = [to_json(message) for message in trace.messages]
            encoded = {name: to_json(value) for name, value in values.items()}
        except (TypeError, ValueError, RecursionError):
            return cls(**whole, document=pack_document({"messages": trace.messages, **values}))
        fingerprint = _fingerprint(trace, whole["arrays"], messages, encoded)
        return cls(**whole, messages=messages, fields=encoded, fingerprint=fingerprint)

    def document_without(self, delta: Delta | None) -> bytes:
        """Return the document as a blob, without the part that is read from a base."""
        if self.document is not None:
            return self.document
        num_messages, kept = 0, self.fields
        if delta is not None:
            num_messages = delta.num_messages
            kept = {name: value for name, value in self.fields.items() if name not in delta.fields}
            kept[_DELTA] = to_json([delta.num_ids, num_messages, delta.fields])
        members = [b'"messages":[' + b",".join(self.messages[num_messages:]) + b"]"]
        members += [b'"%s":%s' % (name.encode(), value) for name, value in kept.items()]
        return pack_json(b"{" + b",".join(members) + b"}")


def _fingerprint(
    trace: Trace, arrays: Mapping[str, bytes], messages: Sequence[bytes], encoded: Mapping[str, bytes]
) -> TraceFingerprint:
    prompt = arrays["prompt_ids"]
    node = CallNode.of(trace.id, prompt + arrays["response_ids"])
    message_hashes = array("q", map(hash, [*messages, encoded["response"]]))
    field_hashes = {name: hash(encoded[name]) for name in _SHARED_FIELDS if name in encoded}
    content = (hash(prompt), node.ids_hash, message_hashes.tobytes(), tuple(field_hashes.items()))
    return TraceFingerprint(
        session_id=trace.session_id,
        node=node,
        digest=hash(content).to_bytes(_HASH_BYTES, "little", signed=True),
        prompt_hash=content[0],
        num_prompt_ids=len(trace.prompt_ids),
        message_hashes=message_hashes,
        field_hashes=field_hashes,
    )


@dataclass(slots=True)
class RecentTraces:
    """The latest traces of the sessions in use. Only the writer's thread uses it."""

    _sessions: OrderedDict[str, OrderedDict[str, TraceFingerprint]] = field(default_factory=OrderedDict)

    def delta_of(self, trace: EncodedTrace) -> Delta | None:
        """Return what a trace shares with its parent, or else with the latest trace of its session.

        `None` if that would not make it smaller.
        """
        recent = self._sessions.get(trace.session_id)
        own = trace.fingerprint
        if not recent or own is None:
            return None
        base = recent.get(trace.parent_id or "") or next(reversed(recent.values()))
        num_ids = 0
        if base.node.precedes(trace.arrays["prompt_ids"]):
            num_ids = base.node.num_ids
        elif own.prompt_hash == base.prompt_hash:
            num_ids = own.num_prompt_ids
        alike = takewhile(bool, map(eq, own.message_hashes[:-1], base.message_hashes))
        num_messages = sum(1 for _ in alike)
        same = [name for name, value in own.field_hashes.items() if base.field_hashes.get(name) == value]
        if not (num_ids or num_messages or "tools" in same):
            return None
        return Delta(base=base, num_ids=num_ids, num_messages=num_messages, fields=same)

    def remember(self, traces: Iterable[EncodedTrace]) -> None:
        """Remember written traces as the latest ones of their sessions."""
        for own in (trace.fingerprint for trace in traces):
            if own is None:
                continue
            recent = self._sessions.setdefault(own.session_id, OrderedDict())
            self._sessions.move_to_end(own.session_id)
            recent[own.id] = own
            recent.move_to_end(own.id)
            if len(recent) > _MAX_TRACES:
                recent.popitem(last=False)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)


def decode_document(blob: bytes, base: Trace | None) -> tuple[dict[str, Any], list[int], int]:
    """Return the fields of a trace's document, the prompt ids taken from its base, and the size of its JSON in bytes.

    Raises:
        LookupError: if the trace needs a base that is not given.
    """
    document: dict[str, Any]
    document, size = unpack_sized_document(blob)
    delta = document.pop(_DELTA, None)
    if delta is None:
        return document, [], size
    if base is None:
        raise LookupError("the trace that this one continues is missing")
    num_ids, num_messages, same = delta
    document["messages"] = [*base.messages, base.response][:num_messages] + document["messages"]
    document |= {name: getattr(base, name) for name in same}
    # Bounded by the base: a damaged row cannot claim more ids than there are.
    ids = base.prompt_ids if num_ids == len(base.prompt_ids) else (base.prompt_ids + base.response_ids)[:num_ids]
    return document, ids if num_ids else [], size
