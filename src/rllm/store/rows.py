"""Traces as rows of SQL stores, without the part that they share with an earlier trace of their session.

The prompt of a conversation's turn begins with the prompt and the answer of the turn before, so without deltas the size
of a session of n turns would be proportional to n squared. A trace that has a *base* is stored as "the first k ids
and m messages of the base, and these fields of it", followed by its own. Only content that is equal is left out, and
only if the writing transaction finds the base stored with exactly that content. Written traces are remembered by hashes
alone, so that a process that runs for weeks stays small.

`rllm.types.Trace` declares how each field is stored; the tables and all else here follow it. `?` stands for a value in
every statement.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import islice, takewhile
from operator import attrgetter, eq, itemgetter
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from rllm._runtime.untrusted import TooLargeError
from rllm.capture.session_tree import CallNode
from rllm.errors import StoreError
from rllm.store.base import SessionInfo
from rllm.store.codec import (
    UNREADABLE,
    UNWRITABLE,
    any_to_json,
    floats_to_bytes,
    ids_to_bytes,
    pack_floats,
    pack_ids,
    pack_json,
    to_json,
    unpack_document,
    unpack_floats,
    unpack_ids,
    unpack_sized_document,
)
from rllm.types import JSONObject, StepCredit, Trace

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


def kinds_of(record: type) -> dict[str, ColumnKind | None]:
    """Return the kind of each field by its type; `None` for a field that only JSON can hold."""
    return {name: _kind_of_type(hint) for name, hint in get_type_hints(record).items()}


def _kind_of_type(hint: Any) -> ColumnKind | None:
    options = [option for option in get_args(hint) if option is not NoneType]
    if get_origin(hint) is Literal:
        return "text"
    return _KINDS.get(options[0] if NoneType in get_args(hint) else hint)


def columns_of(record: type, *, default: str = "column") -> dict[str, ColumnKind]:
    """Return the kind of each field that has a column, without the session's id, which rows replace by its number."""
    kinds = kinds_of(record)
    found: dict[str, ColumnKind] = {}
    for item in fields(record):
        if item.metadata.get("store", default) == "column" and item.name != "session_id":
            kind = kinds[item.name]
            assert kind is not None, f"{record.__name__}.{item.name} has a type that no column can hold"
            found[item.name] = kind
    return found


def _stored_as(kind: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(Trace) if item.metadata.get("store", "document") == kind)


_TRACE_COLUMNS = columns_of(Trace, default="document")
SCALARS = {name: kind for name, kind in _TRACE_COLUMNS.items() if kind not in ("ids", "floats")}
"""Columns of a trace with text and numbers."""
ARRAYS = {name: kind for name, kind in _TRACE_COLUMNS.items() if kind in ("ids", "floats")}
"""Columns of a trace with one number for each token."""
CREDIT_COLUMNS = columns_of(StepCredit)

_SHARED_FIELDS = _stored_as("shared")
_DOCUMENT_FIELDS = tuple(name for name in (*_stored_as("document"), *_SHARED_FIELDS) if name != "messages")
_DEFAULTS: JSONObject = {
    item.name: item.default if item.default_factory is MISSING else item.default_factory() for item in fields(Trace)
}
_DOCUMENT_DEFAULTS = tuple((name, _DEFAULTS[name]) for name in _DOCUMENT_FIELDS)
_ENCODE: Mapping[str, Callable[[Sequence[Any]], bytes]] = {"ids": ids_to_bytes, "floats": floats_to_bytes}
_PACK: Mapping[str, Callable[[bytes], bytes]] = {"ids": pack_ids, "floats": pack_floats}
_scalars_of = attrgetter(*SCALARS)


class TraceFingerprint(NamedTuple):
    """Hashes of a written trace: enough to recognize what a later one repeats."""

    session_id: str
    node: CallNode
    digest: bytes
    """Hash of everything that a later trace may leave out."""
    prompt_hash: int
    num_prompt_ids: int
    messages_hash: int
    """Hash of the messages of the prompt as JSON."""
    message_ends: array[int]
    """End of each message of the prompt in this JSON."""
    message_hashes: array[int]
    """One for each message of the prompt, and one for the answer."""
    field_hashes: Mapping[str, int]

    @property
    def id(self) -> str:
        return self.node.trace_id

    def begins(self, messages: bytes) -> bool:
        """Return whether messages, as JSON without the brackets around them, begin with this trace's messages."""
        size = self.message_ends[-1] if self.message_ends else 0
        return messages[size : size + 1] in (b",", b"") and hash(messages[:size]) == self.messages_hash


class Delta(NamedTuple):
    """The part of a trace that is read from its base."""

    base: TraceFingerprint
    num_ids: int
    num_messages: int
    fields: Sequence[str]


class EncodedTrace(NamedTuple):
    """A whole trace as bytes. It refers to none of the trace's objects, so later changes to them do not affect it."""

    session_id: str
    id: str
    parent_id: str | None
    scalars: tuple[object, ...]
    """Values of `SCALARS`."""
    arrays: Mapping[str, bytes]
    """Token ids as four bytes each, and floats as eight."""
    messages: bytes
    """The messages as JSON, without the brackets around them."""
    fields: Mapping[str, bytes]
    """Each other field of the document that differs from its default, as JSON."""
    is_plain: bool
    """False if only the standard library can write the document."""
    fingerprint: TraceFingerprint

    @classmethod
    def of(cls, trace: Trace, earlier: TraceFingerprint | None = None) -> EncodedTrace:
        """Encode a trace; raise `StoreError` if a token id is not an unsigned integer of 32 bits.

        Messages that an earlier trace had are not hashed again one by one, so that a turn of a long conversation takes
        no longer than one of a short one.
        """
        # Compressed later, by the writer's thread: compression releases the interpreter's lock, and this thread would
        # have to wait for it.
        arrays = {name: _ENCODE[kind](getattr(trace, name)) for name, kind in ARRAYS.items()}
        values = {name: value for name, default in _DOCUMENT_DEFAULTS if (value := getattr(trace, name)) != default}
        ends, hashes = array("Q"), array("q")
        pieces: Iterable[bytes]
        try:
            messages = to_json(trace.messages)[1:-1]
            encoded = {name: to_json(value) for name, value in values.items()}
            is_plain = True
            if earlier is not None and earlier.begins(messages):
                ends, hashes = earlier.message_ends[:], earlier.message_hashes[:-1]
            pieces = map(to_json, islice(trace.messages, len(ends), None))
        except UNWRITABLE:
            is_plain = False
            pieces = [any_to_json(message) for message in trace.messages]
            messages = b",".join(pieces)
            encoded = {name: any_to_json(value) for name, value in values.items()}
        for piece in pieces:
            ends.append(len(piece) + (ends[-1] + 1 if ends else 0))
            hashes.append(hash(piece))
        node = CallNode.of(trace.id, arrays["prompt_ids"] + arrays["response_ids"])
        prompt_hash = hash(arrays["prompt_ids"])
        hashes.append(hash(encoded["response"]))
        field_hashes = {name: hash(encoded[name]) for name in _SHARED_FIELDS if name in encoded}
        content = (prompt_hash, node.ids_hash, hashes.tobytes(), tuple(field_hashes.items()))
        fingerprint = TraceFingerprint(
            session_id=trace.session_id,
            node=node,
            digest=hash(content).to_bytes(_HASH_BYTES, "little", signed=True),
            prompt_hash=prompt_hash,
            num_prompt_ids=len(trace.prompt_ids),
            messages_hash=hash(messages),
            message_ends=ends,
            message_hashes=hashes,
            field_hashes=field_hashes,
        )
        return cls(
            session_id=trace.session_id,
            id=trace.id,
            parent_id=trace.parent_id,
            scalars=_scalars_of(trace),
            arrays=arrays,
            messages=messages,
            fields=encoded,
            is_plain=is_plain,
            fingerprint=fingerprint,
        )

    def document_without(self, delta: Delta | None) -> bytes:
        """Return the document as a blob, without the part that is read from a base."""
        start, kept = 0, self.fields
        if delta is not None:
            start = self.fingerprint.message_ends[delta.num_messages - 1] + 1 if delta.num_messages else 0
            kept = {name: value for name, value in self.fields.items() if name not in delta.fields}
            kept[_DELTA] = to_json([delta.num_ids, delta.num_messages, delta.fields])
        members = [b'"messages":[' + self.messages[start:] + b"]"]
        members += [b'"%s":%s' % (name.encode(), value) for name, value in kept.items()]
        return pack_json(b"{" + b",".join(members) + b"}", is_plain=self.is_plain)


@dataclass(slots=True)
class RecentTraces:
    """The latest traces of the sessions in use. Only the writer's thread changes it."""

    _sessions: OrderedDict[str, OrderedDict[str, TraceFingerprint]] = field(default_factory=OrderedDict)

    def parent_of(self, trace: Trace) -> TraceFingerprint | None:
        """Return the parent of a trace, if it is remembered. Any thread may call this."""
        recent = self._sessions.get(trace.session_id)
        return recent.get(trace.parent_id or "") if recent else None

    def delta_of(self, trace: EncodedTrace) -> Delta | None:
        """Return what a trace shares with its parent, or else with the latest trace of its session.

        `None` if that would not make it smaller.
        """
        recent = self._sessions.get(trace.session_id)
        own = trace.fingerprint
        if not recent:
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
            recent = self._sessions.setdefault(own.session_id, OrderedDict())
            self._sessions.move_to_end(own.session_id)
            recent[own.id] = own
            recent.move_to_end(own.id)
            if len(recent) > _MAX_TRACES:
                recent.popitem(last=False)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)


def decode_document(blob: bytes, base: Trace | None) -> tuple[JSONObject, list[int], int]:
    """Return the fields of a trace's document, the prompt ids taken from its base, and the size of its JSON in bytes.

    Raises:
        LookupError: if the trace needs a base that is not given.
    """
    document: JSONObject
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


SCHEMA = 4
"""Version of the tables and of the blobs in them. A store of another version is refused."""

_MAX_SESSION_BYTES = 2 * 1024 * 1024 * 1024
"""Limit on the unpacked size of one session: a damaged row of a few bytes may claim all the content of another row."""

SESSION = "(SELECT seq FROM sessions WHERE id = ?)"

Row: TypeAlias = tuple[Any, ...]

TRACE_COLUMNS = (*SCALARS, *ARRAYS, "document", "digest")
_CREDIT_NAMES = tuple(CREDIT_COLUMNS)
_CREDIT_KEY = ("session", "trace_id", "training_step", "trajectory_index")


def create_tables(types: Mapping[str, str]) -> tuple[str, ...]:
    """Return the statements that make the tables.

    Args:
        types: The database's types for `key` (a number that counts up), `text`, `integer`, `real` and `blob`.
    """
    types = {"ids": types["blob"], "floats": types["blob"], **types}
    scalars = [f"{name} {types[kind]}" for name, kind in SCALARS.items()]
    arrays = [f"{name} {types['blob']} NOT NULL" for name in ARRAYS]
    credited = [f"{name} {types[kind]}" for name, kind in CREDIT_COLUMNS.items()]
    tables = {
        "sessions": [
            f"seq {types['key']}",
            f"id {types['text']} NOT NULL UNIQUE",
            f"created_at {types['real']} NOT NULL",
            f"metadata {types['blob']}",
        ],
        # `seq` is the call order. Ids are unique within a session only, so that a server which repeats its ids cannot
        # overwrite the traces of another rollout. `base` is the `seq` of the trace that this one shares content with.
        "traces": [
            f"seq {types['key']}",
            f"session {types['integer']} NOT NULL",
            f"base {types['integer']}",
            *scalars,
            *arrays,
            f"document {types['blob']} NOT NULL",
            f"digest {types['blob']}",
            "UNIQUE (session, id)",
        ],
        "credits": [f"session {types['integer']} NOT NULL", *credited, f"PRIMARY KEY ({', '.join(_CREDIT_KEY)})"],
    }
    return tuple(f"CREATE TABLE {name} ({', '.join(columns)})" for name, columns in tables.items())


def wrong_schema(store: str, version: int) -> StoreError:
    """Return the error for a store of another schema version."""
    return StoreError(
        f"trace store {store} has schema {version}, and this version of rllm reads schema {SCHEMA} only: use another "
        "store, or copy this one's traces with the version that wrote them (`rllm traces export`)"
    )


@cache
def insert_traces(count: int) -> str:
    """Return the statement that inserts `count` rows of `trace_to_row`."""
    row = f"(?, ?{', ?' * len(TRACE_COLUMNS)})"
    return f"INSERT INTO traces (session, base, {', '.join(TRACE_COLUMNS)}) VALUES {', '.join([row] * count)}"


FIND_TRACE = f"SELECT seq FROM traces WHERE session = {SESSION} AND id = ?"

IS_A_BASE = f"SELECT 1 FROM traces WHERE session = {SESSION} AND base = ? LIMIT 1"

UPDATE_TRACE = (
    f"UPDATE traces SET session = ?, base = ?, {', '.join(f'{name} = ?' for name in TRACE_COLUMNS)} WHERE seq = ?"
)
"""Takes a row of `trace_to_row`, and the `seq` of the row that it replaces."""

# Unordered: to sort the rows, SQLite would copy every blob; the caller does not.
SELECT_TRACES = f"SELECT seq, base, {', '.join(TRACE_COLUMNS)} FROM traces WHERE session = {SESSION}"
"""The rows of a session, for `rows_to_traces`."""

_WHOLE_ROW = ("seq", "base", *TRACE_COLUMNS)
# The recursion has whole rows. Looking them up afterwards could be slow, with a plan based on a guess at their number.
SELECT_TRACE = (
    f"WITH RECURSIVE wanted AS (SELECT {', '.join(_WHOLE_ROW)} FROM traces WHERE session = {SESSION} AND id = ? "
    f"UNION ALL SELECT {', '.join(f'traces.{name}' for name in _WHOLE_ROW)} "
    "FROM wanted JOIN traces ON traces.seq = wanted.base) "
    "SELECT * FROM wanted"
)
"""The row of one trace of a session, and the rows of its bases."""

SELECT_LAST_CALL = f"SELECT MAX(started_at) FROM traces WHERE session = {SESSION}"

# Scans the index of (session, id), which takes about 50 ms for a million traces. Only people ask for this, and an index
# of trace ids would make every write slower.
SELECT_SESSION_OF = "SELECT id FROM sessions WHERE seq = (SELECT session FROM traces WHERE id = ? LIMIT 1)"

SELECT_SESSIONS = (
    "SELECT id, created_at, (SELECT COUNT(*) FROM traces WHERE session = sessions.seq), metadata, seq FROM sessions"
)

UPSERT_CREDIT = (
    f"INSERT INTO credits (session, {', '.join(_CREDIT_NAMES)}) VALUES ({SESSION}{', ?' * len(_CREDIT_NAMES)}) "
    f"ON CONFLICT ({', '.join(_CREDIT_KEY)}) DO UPDATE SET "
    f"{', '.join(f'{name} = excluded.{name}' for name in _CREDIT_NAMES if name not in _CREDIT_KEY)}"
)
"""Takes a row of `credit_to_row`."""

SELECT_CREDITS = (
    f"SELECT {', '.join(f'credits.{name}' for name in _CREDIT_NAMES)} FROM credits "
    "LEFT JOIN traces ON traces.session = credits.session AND traces.id = credits.trace_id "
    f"WHERE credits.session = {SESSION} "
    "ORDER BY traces.seq IS NULL, traces.seq, credits.training_step, credits.trajectory_index"
)
"""The credits of a session in the order of its calls, for `row_to_credit`."""


def trace_to_row(trace: EncodedTrace, session: int, base: int | None = None, delta: Delta | None = None) -> Row:
    """Return the row of a trace: the `seq` of its session and of its base, then the values of `TRACE_COLUMNS`."""
    arrays = dict(trace.arrays)
    if delta is not None:
        arrays["prompt_ids"] = arrays["prompt_ids"][4 * delta.num_ids :]
    blobs = (_PACK[kind](arrays[name]) for name, kind in ARRAYS.items())
    return (session, base, *trace.scalars, *blobs, trace.document_without(delta), trace.fingerprint.digest)


def rows_to_traces(found: Iterable[Row], session_id: str) -> list[tuple[int, int | None, Trace]]:
    """Return the `seq`, the base's `seq` and the trace of each row of `SELECT_TRACES`, in call order.

    Traces of one conversation share the message objects that they have in common.

    Raises:
        LookupError: if the base of a trace is missing.
        ValueError: if a trace cannot be read; the message names it.
    """
    traces: dict[int, Trace] = {}
    bases: dict[int, int | None] = {}
    num_bytes = 0
    for row in sorted(found, key=itemgetter(0)):
        seq, base = row[:2]
        traces[seq], size = _row_to_trace(row[2:], session_id, None if base is None else traces.get(base))
        bases[seq] = base
        num_bytes += size
        if num_bytes > _MAX_SESSION_BYTES:
            raise TooLargeError(f"it unpacks to more than {_MAX_SESSION_BYTES:,} bytes (at call {traces[seq].id!r})")
    return [(seq, bases[seq], trace) for seq, trace in traces.items()]


def _row_to_trace(row: Row, session_id: str, base: Trace | None) -> tuple[Trace, int]:
    """Return the trace, and the approximate number of bytes that it takes in addition to its base."""
    values = dict(zip(TRACE_COLUMNS, row, strict=True))
    del values["digest"]
    try:
        document, shared_ids, size = decode_document(values.pop("document"), base)
        for name, kind in ARRAYS.items():
            values[name] = unpack_ids(values[name]) if kind == "ids" else unpack_floats(values[name])
        if shared_ids:
            values["prompt_ids"] = shared_ids + values["prompt_ids"]
        trace = Trace(session_id=session_id, **values, **document)
        return trace, size + 8 * (len(trace.prompt_ids) + len(trace.response_ids) + len(trace.messages))
    except LookupError:
        raise
    except UNREADABLE as error:
        raise ValueError(f"call {values['id']!r} is unreadable: {error}") from error


def credit_to_row(credit: StepCredit) -> Row:
    """Return the row of a credit: the session's id, then a value for each column."""
    values: list[object] = []
    for name, kind in CREDIT_COLUMNS.items():
        value = getattr(credit, name)
        if value is not None and kind in ("floats", "real"):
            value = (
                pack_floats(floats_to_bytes(value)) if kind == "floats" else float(value)
            )  # SQLite does not accept numpy scalars
        values.append(value)
    return (credit.session_id, *values)


def row_to_credit(row: Row, session_id: str) -> StepCredit:
    """Return the credit of one row of `SELECT_CREDITS`."""
    values = dict(zip(_CREDIT_NAMES, row, strict=True))
    if values["trainer_logprobs"] is not None:
        values["trainer_logprobs"] = unpack_floats(values["trainer_logprobs"])
    return StepCredit(session_id=session_id, **values)


def row_to_session(row: Row) -> SessionInfo:
    """Return the session of one row of `SELECT_SESSIONS`."""
    session_id, created_at, num_traces, metadata, seq = row
    return SessionInfo(
        id=session_id,
        created_at=created_at,
        num_traces=num_traces,
        metadata=unpack_document(metadata) if metadata is not None else {},
        number=seq,
    )
