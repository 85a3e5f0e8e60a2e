"""Tables of the SQL stores: their definition, their statements, and records to rows and back.

Columns follow from the fields of `Trace` and `StepCredit`. `?` stands for a value in every statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, TypeAlias

from rllm._runtime.untrusted import TooLargeError
from rllm.errors import StoreError
from rllm.store.base import SessionInfo
from rllm.store.codec import UNREADABLE, pack_floats, pack_ids, unpack_document, unpack_floats, unpack_ids
from rllm.store.delta import ARRAYS, CREDIT_COLUMNS, SCALARS, Delta, EncodedTrace, decode_document
from rllm.types import StepCredit, Trace

SCHEMA = 4
"""Version of the tables and of the blobs in them. A store of another version is refused."""

_MAX_SESSION_BYTES = 2 * 1024 * 1024 * 1024
"""Unpacked size of one session: a damaged row of a few bytes may stand for as many as another one has."""

SESSION = "(SELECT seq FROM sessions WHERE id = ?)"

Row: TypeAlias = tuple[Any, ...]

TRACE_COLUMNS = (*(column.name for column in SCALARS), *(column.name for column in ARRAYS), "document", "digest")
_CREDIT_NAMES = tuple(column.name for column in CREDIT_COLUMNS)
_CREDIT_KEY = ("session", "trace_id", "training_step", "trajectory_index")


def create_tables(types: Mapping[str, str]) -> tuple[str, ...]:
    """Return the statements that make the tables.

    Args:
        types: The database's types for `key` (a number that counts up), `text`, `integer`, `real` and `blob`.
    """
    types = {"ids": types["blob"], "floats": types["blob"], **types}
    scalars = [f"{column.name} {types[column.kind]}" for column in SCALARS]
    arrays = [f"{column.name} {types['blob']} NOT NULL" for column in ARRAYS]
    credited = [f"{column.name} {types[column.kind]}" for column in CREDIT_COLUMNS]
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
    """Return the statement that inserts so many rows of `trace_to_row`."""
    row = f"(?, ?{', ?' * len(TRACE_COLUMNS)})"
    return f"INSERT INTO traces (session, base, {', '.join(TRACE_COLUMNS)}) VALUES {', '.join([row] * count)}"


FIND_TRACE = f"SELECT seq FROM traces WHERE session = {SESSION} AND id = ?"

IS_A_BASE = f"SELECT 1 FROM traces WHERE session = {SESSION} AND base = ? LIMIT 1"

UPDATE_TRACE = (
    f"UPDATE traces SET session = ?, base = ?, {', '.join(f'{name} = ?' for name in TRACE_COLUMNS)} WHERE seq = ?"
)
"""Takes a row of `trace_to_row`, and the `seq` of the row that it replaces."""

# Unordered: SQLite would copy every blob to sort the rows, and the caller need not.
SELECT_TRACES = f"SELECT seq, base, {', '.join(TRACE_COLUMNS)} FROM traces WHERE session = {SESSION}"
"""The rows of a session, for `rows_to_traces`."""

_WHOLE_ROW = ("seq", "base", *TRACE_COLUMNS)
# Whole rows in the recursion, so that none is looked up twice with a plan that follows from a guess at their number.
SELECT_TRACE = (
    f"WITH RECURSIVE wanted AS (SELECT {', '.join(_WHOLE_ROW)} FROM traces WHERE session = {SESSION} AND id = ? "
    f"UNION ALL SELECT {', '.join(f'traces.{name}' for name in _WHOLE_ROW)} "
    "FROM wanted JOIN traces ON traces.seq = wanted.base) "
    "SELECT * FROM wanted"
)
"""The row of one trace of a session, and those of the traces that it is read with."""

SELECT_LAST_CALL = f"SELECT MAX(started_at) FROM traces WHERE session = {SESSION}"

# Reads through the index of (session, id), about 50 ms for a million traces: only people ask for this, and an index of
# its own would make every write slower.
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
    blobs = (pack_ids(arrays[name]) if kind == "ids" else arrays[name] for name, kind in _ARRAY_KINDS)
    digest = trace.fingerprint.digest if trace.fingerprint else None
    return (session, base, *trace.scalars, *blobs, trace.document_without(delta), digest)


_ARRAY_KINDS = tuple((column.name, column.kind) for column in ARRAYS)


def rows_to_traces(found: Iterable[Row], session_id: str) -> list[tuple[int, int | None, Trace]]:
    """Return the `seq`, the base's `seq` and the trace of each row of `SELECT_TRACES`, in call order.

    Traces of one conversation share the message objects that they have in common.

    Raises:
        LookupError: if the base of a trace is missing.
        ValueError: naming the trace that cannot be read.
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
            raise TooLargeError(
                f"call {traces[seq].id!r} is the first beyond {_MAX_SESSION_BYTES:,} bytes of the session, unpacked"
            )
    return [(seq, bases[seq], trace) for seq, trace in traces.items()]


def _row_to_trace(row: Row, session_id: str, base: Trace | None) -> tuple[Trace, int]:
    """Return the trace, and its approximate size in bytes beside that of its base."""
    values = dict(zip(TRACE_COLUMNS, row, strict=True))
    del values["digest"]
    try:
        document, shared_ids, size = decode_document(values.pop("document"), base)
        for name, kind in _ARRAY_KINDS:
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
    values = (_plain_number(getattr(credit, column.name), column.kind) for column in CREDIT_COLUMNS)
    return (credit.session_id, *values)


def credit_key(row: Row) -> Row:
    """Return the part of a row of `credit_to_row` that no two credits share."""
    return (row[0], *(row[1 + _CREDIT_NAMES.index(name)] for name in _CREDIT_KEY[1:]))


def _plain_number(value: Any, kind: str) -> object:
    """Return a value that a database takes: SQLite does not take scalars of numpy."""
    if value is None:
        return None
    if kind == "floats":
        return pack_floats(value)
    return float(value) if kind == "real" else value


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
