"""Trace store over a SQL database. How to connect and to insert in bulk differs between databases."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rllm.errors import StoreError
from rllm.store import rows
from rllm.store.base import SessionInfo, SessionRef
from rllm.store.codec import UNREADABLE, pack_document, unpack_document
from rllm.store.delta import Delta, EncodedTrace, RecentTraces
from rllm.store.rows import Row
from rllm.store.writer import GroupCommitWriter, Work
from rllm.types import JSONMapping, JSONObject, StepCredit, Trace

P = TypeVar("P")
R = TypeVar("R")


class Cursor(Protocol):
    """Result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...


class SqlConnection(Protocol):
    """A connection inside a transaction; `?` stands for a value in every statement."""

    lock: str
    """Suffix of a SELECT that makes it wait for other writers of the rows, and keeps them away; empty if there are
    none."""

    def execute(self, statement: str, values: Sequence[object] = ()) -> Cursor: ...

    def ensure_sessions(self, sessions: Mapping[str, float | None]) -> Mapping[str, int]:
        """Create missing sessions, and keep other writers away from all of them.

        Args:
            sessions: The creation time of each in Unix seconds; `None` for one that must not be created.

        Returns:
            The `seq` of each session that exists.
        """
        ...

    def bases(self, wanted: Sequence[tuple[int, str, bytes]]) -> dict[tuple[int, str, bytes], int]:
        """Return the `seq` of those traces (session's number, id, digest) that are stored with exactly this content."""
        ...

    def insert_traces(self, values: Sequence[Row]) -> bool:
        """Insert rows of `rows.trace_to_row`: all of them, or none (False) if an id exists already."""
        ...


class SqlTraceStore(ABC):
    """The `TraceStore` protocol over SQL: one writer with group commit, and any number of readers.

    Traces are turned into bytes before `add` returns. Values without a JSON form come back as the nearest one that has
    one.
    """

    _name: str
    """Names the store in errors."""
    _writer: GroupCommitWriter[SqlConnection] | None
    is_local: bool

    def __init__(self) -> None:
        self._add = _AddTraces()
        self._closed = False

    @abstractmethod
    def _read(self, statement: str, *values: object) -> list[Row]:
        """Return the rows of a query, with `?` for each value."""

    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def _close_readers(self) -> None: ...

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        try:
            encoded = [EncodedTrace.of(trace) for trace in traces]
        except StoreError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused
        return _with_number(session, self._write(self._add, (encoded, session)))

    def open_session(
        self,
        session_id: str,
        metadata: JSONMapping,
        *,
        created_at: float | None = None,
        session: SessionRef | None = None,
    ) -> Future[None]:
        write = self._write(_merge_sessions, (session_id, dict(metadata), created_at or time.time()))
        return _with_number(session, write)

    def annotate(self, credits: Sequence[StepCredit]) -> Future[None]:
        return self._write(_annotate, [rows.credit_to_row(credit) for credit in credits])

    def delete(self, session_id: str) -> int:
        num_traces: int = self._write(_delete, session_id).result()
        return num_traces

    def session(self, session_id: str) -> SessionInfo | None:
        found = self._read(f"{rows.SELECT_SESSIONS} WHERE id = ?", session_id)
        return self._infos(found)[0] if found else None

    def sessions(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        oldest_first: bool = False,
        beyond: int | None = None,
        created_before: float | None = None,
    ) -> list[SessionInfo]:
        order, after = ("ASC", ">") if oldest_first else ("DESC", "<")
        limits = {f"seq {after} ?": beyond, "created_at < ?": created_before}
        asked = {condition: value for condition, value in limits.items() if value is not None}
        where = f"WHERE {' AND '.join(asked)}" if asked else ""
        found = self._read(
            f"{rows.SELECT_SESSIONS} {where} ORDER BY seq {order} LIMIT ? OFFSET ?", *asked.values(), limit, offset
        )
        return self._infos(found)

    def by_session(self, session_id: str) -> list[Trace]:
        return self._traces(self._read(rows.SELECT_TRACES, session_id), session_id)

    def trace(self, session_id: str, trace_id: str) -> Trace | None:
        found = self._traces(self._read(rows.SELECT_TRACE, session_id, trace_id), session_id)
        return found[-1] if found else None  # after its bases; its id may be stored as an escape

    def last_call_at(self, session_id: str) -> float | None:
        found: list[tuple[float | None]] = self._read(rows.SELECT_LAST_CALL, session_id)
        return found[0][0]

    def session_of(self, trace_id: str) -> str | None:
        found = self._read(rows.SELECT_SESSION_OF, trace_id)
        return found[0][0] if found else None

    def credits(self, session_id: str) -> list[StepCredit]:
        found = self._read(rows.SELECT_CREDITS, session_id)
        with self._damage_named(session_id):
            return [rows.row_to_credit(row, session_id) for row in found]

    def _infos(self, found: list[Row]) -> list[SessionInfo]:
        infos = []
        for row in found:
            with self._damage_named(row[0]):
                infos.append(rows.row_to_session(row))
        return infos

    def _traces(self, found: list[Row], session_id: str) -> list[Trace]:
        with self._damage_named(session_id):
            return [trace for _, _, trace in rows.rows_to_traces(found, session_id)]

    @contextmanager
    def _damage_named(self, session_id: str) -> Iterator[None]:
        """Name the session whose rows cannot be read."""
        try:
            yield
        except UNREADABLE as error:
            raise StoreError(
                f"trace store {self._name}, session {session_id!r}: {error}: it was edited or damaged: restore a copy"
            ) from error

    def close(self) -> None:
        self._closed = True
        self._close_readers()
        # Last, because only the last connection that may write moves the content of SQLite's -wal file into the
        # store's.
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, work: Work[SqlConnection, P, R], payload: P) -> Future[R]:
        if self._writer is None:
            raise StoreError(f"trace store {self._name} was opened with read_only=True: open it again to write")
        return self._writer.submit(work, payload)


def _with_number(session: SessionRef | None, write: Future[Any]) -> Future[Any]:
    """Have the reference learn the session's number from the write, before the next transaction begins."""
    if session is not None and session.number is None:
        write.add_done_callback(session.learn)
    return write


_Batch = tuple[list[EncodedTrace], SessionRef | None]


class _AddTraces:
    """Work of adding traces. It runs in the writer's thread and remembers the traces of its last transactions.

    It is not informed of commits: traces of a transaction that was rolled back are not found in the database.
    """

    def __init__(self) -> None:
        self._recent = RecentTraces()

    def __call__(self, connection: SqlConnection, batches: list[_Batch]) -> list[int | StoreError | None]:
        seqs = connection.ensure_sessions(_sessions_of(batches))
        results = [_number_or_refusal(batch, session, seqs) for batch, session in batches]
        accepted = (batch for (batch, _), result in zip(batches, results, strict=True) if isinstance(result, int))
        traces = list(chain.from_iterable(accepted))
        deltas = [self._recent.delta_of(trace) for trace in traces]
        if not connection.insert_traces(_rows(connection, traces, deltas, seqs)):
            for trace in traces:
                _put(connection, trace, seqs[trace.session_id])
        self._recent.remember(traces)
        return results


def _rows(
    connection: SqlConnection, traces: Sequence[EncodedTrace], deltas: Sequence[Delta | None], seqs: Mapping[str, int]
) -> list[Row]:
    """Return the rows of new traces. A trace whose base is not stored with the expected content is written whole."""
    keys = [_base_key(delta, seqs) for delta in deltas]
    wanted = [key for key in keys if key is not None]
    stored = connection.bases(wanted) if wanted else {}
    found = []
    for trace, delta, key in zip(traces, deltas, keys, strict=True):
        base = None if key is None else stored.get(key)
        found.append(rows.trace_to_row(trace, seqs[trace.session_id], base, None if base is None else delta))
    return found


def _base_key(delta: Delta | None, seqs: Mapping[str, int]) -> tuple[int, str, bytes] | None:
    return (seqs[delta.base.session_id], delta.base.id, delta.base.digest) if delta is not None else None


def _sessions_of(batches: Sequence[_Batch]) -> dict[str, float | None]:
    """Return the sessions to ensure. One whose number is known existed before, so it is not created again."""
    now = time.time()
    wanted: dict[str, float | None] = {}
    for batch, session in batches:
        for trace in batch:
            if session is None or session.number is None:
                wanted[trace.session_id] = now
            else:
                wanted.setdefault(trace.session_id, None)
    return wanted


def _number_or_refusal(
    batch: list[EncodedTrace], session: SessionRef | None, seqs: Mapping[str, int]
) -> int | StoreError | None:
    """Return the number of the session that traces are added to (`None` without traces), or an error."""
    if not batch:
        return None
    session_id = batch[0].session_id
    number = seqs.get(session_id)
    refused = None if session is None else session.refusal(session_id, number)
    return refused or number


def _put(connection: SqlConnection, trace: EncodedTrace, session: int) -> None:
    """Insert one whole trace, or replace the one that has its id."""
    found = connection.execute(rows.FIND_TRACE, (trace.session_id, trace.id)).fetchone()
    if found is None:
        connection.execute(rows.insert_traces(1), rows.trace_to_row(trace, session))
        return
    [seq] = found
    if connection.execute(rows.IS_A_BASE, (trace.session_id, seq)).fetchone() is not None:
        stored = connection.execute(rows.SELECT_TRACES, (trace.session_id,)).fetchall()
        for child_seq, base, child in rows.rows_to_traces(stored, trace.session_id):
            if base == seq:
                whole = rows.trace_to_row(EncodedTrace.of(child), session)
                connection.execute(rows.UPDATE_TRACE, (*whole, child_seq))
    connection.execute(rows.UPDATE_TRACE, (*rows.trace_to_row(trace, session), seq))


def _annotate(connection: SqlConnection, batches: list[list[Row]]) -> list[None]:
    # The latest credit counts, and one statement must not write two of the same key.
    latest = {rows.credit_key(row): row for row in chain.from_iterable(batches)}
    there = connection.ensure_sessions({session_id: None for session_id, *_ in latest})
    for row in latest.values():
        if row[0] in there:
            connection.execute(rows.UPSERT_CREDIT, row)
    return [None] * len(batches)


def _merge_sessions(connection: SqlConnection, sessions: list[tuple[str, JSONObject, float]]) -> list[int]:
    began: dict[str, float | None] = {}
    for session_id, _, created_at in sessions:
        began.setdefault(session_id, created_at)
    seqs = connection.ensure_sessions(began)
    for session_id, metadata, _ in sessions:
        [[stored]] = connection.execute("SELECT metadata FROM sessions WHERE id = ?", (session_id,)).fetchall()
        merged = {**(unpack_document(stored) if stored is not None else {}), **metadata}
        connection.execute("UPDATE sessions SET metadata = ? WHERE id = ?", (pack_document(merged), session_id))
    return [seqs[session_id] for session_id, _, _ in sessions]


def _delete(connection: SqlConnection, session_ids: list[str]) -> list[int]:
    return [_delete_one(connection, session_id) for session_id in session_ids]


def _delete_one(connection: SqlConnection, session_id: str) -> int:
    # Locked first, where a database locks rows: a trace that another process adds now comes before, or after.
    found = connection.execute(f"SELECT seq FROM sessions WHERE id = ?{connection.lock}", (session_id,)).fetchone()
    if found is None:
        return 0
    num_traces = connection.execute("DELETE FROM traces WHERE session = ?", found).rowcount
    connection.execute("DELETE FROM credits WHERE session = ?", found)
    connection.execute("DELETE FROM sessions WHERE seq = ?", found)
    return num_traces
