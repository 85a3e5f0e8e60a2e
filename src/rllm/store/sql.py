"""Trace store over a SQL database; connections and bulk inserts differ between databases."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from rllm.errors import StoreError
from rllm.store import rows
from rllm.store.base import SessionInfo, SessionRef
from rllm.store.codec import UNREADABLE, pack_document, unpack_document
from rllm.store.rows import EncodedTrace, RecentTraces, Row
from rllm.store.writer import Database, GroupCommitWriter, Work
from rllm.types import JSONMapping, JSONObject, StepCredit, Trace

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R", bound="_Closable")
"""Connection that reads."""


class Cursor(Protocol):
    """Result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...


class SqlConnection(Protocol):
    """A connection inside a transaction; `?` stands for a value in every statement."""

    lock: str
    """Suffix of a SELECT that locks its rows against other writers; empty if a transaction excludes them anyway."""

    def execute(self, statement: str, values: Sequence[object] = ()) -> Cursor: ...

    def ensure_sessions(self, sessions: Mapping[str, float | None]) -> Mapping[str, int]:
        """Create missing sessions, and lock all of them against other writers.

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


class SqlTraceStore(ABC, Generic[R]):
    """The `TraceStore` protocol over SQL: one writer with group commit, and any number of readers.

    Traces are turned into bytes before `add` returns. Values without a JSON form are read back as the nearest ones with
    such a form.
    """

    is_local: bool

    def __init__(self, name: str, database: Database[SqlConnection] | None, *, timeout_s: float) -> None:
        """Start the writer and open the first reader.

        Args:
            name: Names the store in errors.
            database: Where to write; `None` for a store that is only read.
            timeout_s: Seconds to wait for room in the queue of writes.
        """
        self._name = name
        self._add = _AddTraces()
        self._closed = False
        self._writer = None if database is None else GroupCommitWriter(database, timeout_s=timeout_s)
        # These run when the store is garbage-collected and when the interpreter exits: pending writes are flushed
        # either way.
        if self._writer is not None:
            weakref.finalize(self, self._writer.close)
        self._idle_readers: list[R] = [self._open_reader()]
        weakref.finalize(self, close_all, self._idle_readers)

    @abstractmethod
    def _open_reader(self) -> R: ...

    @abstractmethod
    def _read(self, statement: str, *values: object) -> list[Row]:
        """Return the rows of a query, with `?` for each value."""

    @abstractmethod
    def num_bytes(self) -> int: ...

    @contextmanager
    def _reader(self) -> Iterator[R]:
        """Yield a connection that no other thread uses; as many are kept as were ever needed at once."""
        if self._closed:
            raise StoreError(f"trace store {self._name} is closed: open a new one")
        try:
            reader = self._idle_readers.pop()
        except IndexError:
            reader = self._open_reader()
        try:
            yield reader
        finally:
            if not getattr(reader, "closed", False):  # it is if the server was lost
                self._idle_readers.append(reader)
            if self._closed:
                close_all(self._idle_readers)

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        try:
            encoded = [EncodedTrace.of(trace, self._add.recent.parent_of(trace)) for trace in traces]
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
        self, *, limit: int = 100, offset: int = 0, oldest_first: bool = False, beyond: int | None = None
    ) -> list[SessionInfo]:
        order, after = ("ASC", ">") if oldest_first else ("DESC", "<")
        where = "" if beyond is None else f"WHERE seq {after} ?"
        found = self._read(
            f"{rows.SELECT_SESSIONS} {where} ORDER BY seq {order} LIMIT ? OFFSET ?",
            *(() if beyond is None else (beyond,)),
            limit,
            offset,
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
        """Convert errors from unreadable rows to a `StoreError` that names their session."""
        try:
            yield
        except UNREADABLE as error:
            raise StoreError(
                f"trace store {self._name}: session {session_id!r} is damaged ({error}): restore a copy of the store"
            ) from error

    def close(self) -> None:
        self._closed = True
        close_all(self._idle_readers)
        # Last, because only the last connection that may write moves the content of SQLite's -wal file into the
        # store's.
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, work: Work[SqlConnection, P, T], payload: P) -> Future[T]:
        if self._writer is None:
            raise StoreError(f"trace store {self._name} was opened with read_only=True: open it again to write")
        return self._writer.submit(work, payload)


class _Closable(Protocol):
    def close(self) -> None: ...


def close_all(connections: MutableSequence[R]) -> None:
    """Close connections and remove them from the list."""
    while connections:
        connections.pop().close()


def _with_number(session: SessionRef | None, write: Future[Any]) -> Future[Any]:
    """Have the reference learn the session's number from the write, before the next transaction begins."""
    if session is not None and session.number is None:
        write.add_done_callback(session.learn)
    return write


_Batch = tuple[list[EncodedTrace], SessionRef | None]


class _AddTraces:
    """Adds traces, in the writer's thread, and remembers the traces of its last transactions.

    It does not know which transactions were committed: traces of one that was rolled back are not in the database.
    """

    def __init__(self) -> None:
        self.recent = RecentTraces()

    def __call__(self, connection: SqlConnection, batches: list[_Batch]) -> list[int | StoreError | None]:
        now = time.time()
        wanted: dict[str, float | None] = {}
        for batch, session in batches:
            for trace in batch:
                if session is None or session.number is None:
                    wanted[trace.session_id] = now
                else:  # it existed before, so it is not created again
                    wanted.setdefault(trace.session_id, None)
        seqs = connection.ensure_sessions(wanted)
        results: list[int | StoreError | None] = []
        traces: list[EncodedTrace] = []
        for batch, session in batches:
            number = seqs.get(batch[0].session_id) if batch else None
            refused = session.refusal(batch[0].session_id, number) if batch and session is not None else None
            results.append(refused or number)
            traces += () if refused else batch
        if not connection.insert_traces(self._rows(connection, traces, seqs)):
            for trace in traces:
                _put(connection, trace, seqs[trace.session_id])
        self.recent.remember(traces)
        return results

    def _rows(self, connection: SqlConnection, traces: Sequence[EncodedTrace], seqs: Mapping[str, int]) -> list[Row]:
        """Return the rows of new traces. One whose base is not stored with the expected content is written whole."""
        deltas = [self.recent.delta_of(trace) for trace in traces]
        keys = [
            None if delta is None else (seqs[delta.base.session_id], delta.base.id, delta.base.digest)
            for delta in deltas
        ]
        wanted = [key for key in keys if key is not None]
        stored = connection.bases(wanted) if wanted else {}
        found = []
        for trace, delta, key in zip(traces, deltas, keys, strict=True):
            base = None if key is None else stored.get(key)
            found.append(rows.trace_to_row(trace, seqs[trace.session_id], base, None if base is None else delta))
        return found


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
    annotations = list(chain.from_iterable(batches))
    stored = connection.ensure_sessions({session_id: None for session_id, *_ in annotations})
    for row in annotations:
        if row[0] in stored:
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
    counts = []
    for session_id in session_ids:
        # Lock the session first, in a database that locks rows: others add traces either before this, or after it.
        found = connection.execute(f"SELECT seq FROM sessions WHERE id = ?{connection.lock}", (session_id,)).fetchone()
        if found is None:
            counts.append(0)
            continue
        counts.append(connection.execute("DELETE FROM traces WHERE session = ?", found).rowcount)
        connection.execute("DELETE FROM credits WHERE session = ?", found)
        connection.execute("DELETE FROM sessions WHERE seq = ?", found)
    return counts
