"""The trace store over a SQL database: what is asked of it. How to connect and to insert in bulk is each database's own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self

from rllm.errors import StoreError
from rllm.store import rows
from rllm.store.base import SessionInfo, SessionRef
from rllm.store.codec import UNREADABLE, pack_document, unpack_document
from rllm.store.rows import Row
from rllm.store.turns import Draft, KnownTurns, PackedTrace, draft_of, pack
from rllm.store.writer import GroupCommitWriter, Work
from rllm.types import StepCredit, Trace


class Cursor(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class SqlConnection(Protocol):
    """A connection inside a transaction; `?` stands for a value in every statement."""

    schema: int
    """The version of the tables."""
    lock: str
    """What makes a SELECT of a session wait until nobody else writes to it, and keep others from it; empty where a writer
    is alone anyway."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Cursor: ...

    def ensure_sessions(self, sessions: Mapping[str, float | None]) -> Mapping[str, int]:
        """Create the sessions that are not there yet, and keep other writers from all of them; the values are when they
        began, in Unix seconds, `None` for one that is not to be created. Returns the `seq` of each that is there."""
        ...

    def bases(self, wanted: Sequence[tuple[int, str, bytes]]) -> dict[tuple[int, str, bytes], int]:
        """The `seq` of those traces (number of the session, id, digest) that are stored with this very content."""
        ...

    def insert_traces(self, values: Sequence[Row]) -> bool:
        """Insert rows as `rows.insert_traces` takes them: all, or none (False) where an id is there already."""
        ...


class SqlTraceStore(ABC):
    """The `TraceStore` protocol over SQL: one writer with group commit, readers beside it.

    Traces are turned into bytes before `add` returns. Values that JSON has no form for come back as the nearest that it has.
    """

    _name: str
    """Names the store in errors."""
    _writer: GroupCommitWriter[Any] | None
    is_local: bool

    def __init__(self) -> None:
        self._add = _Adding()
        self._closed = False

    @abstractmethod
    def _read(self, statement: str, *values: Any) -> list[Any]:
        """The rows of a query, with `?` for each value."""

    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def _close_readers(self) -> None: ...

    @property
    def takes_arrays(self) -> bool:
        """Whether traces may come with arrays of tokens in the place of lists; not where a subclass looks at them first."""
        return type(self).add is SqlTraceStore.add

    @property
    def _schema(self) -> int:
        """The version of the tables that are read."""
        return rows.SCHEMA

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        try:
            drafts = [draft_of(trace) for trace in traces]
        except StoreError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused
        return _told(session, self._write(self._add, (drafts, session)))

    def open_session(
        self,
        session_id: str,
        metadata: Mapping[str, Any],
        *,
        created_at: float | None = None,
        session: SessionRef | None = None,
    ) -> Future[None]:
        write = self._write(_merge_sessions, (session_id, dict(metadata), created_at or time.time()))
        return _told(session, write)

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
        order, behind = ("ASC", ">") if oldest_first else ("DESC", "<")
        limits = {f"seq {behind} ?": beyond, "created_at < ?": created_before}
        asked = {condition: value for condition, value in limits.items() if value is not None}
        where = f"WHERE {' AND '.join(asked)}" if asked else ""
        found = self._read(
            f"{rows.SELECT_SESSIONS} {where} ORDER BY seq {order} LIMIT ? OFFSET ?", *asked.values(), limit, offset
        )
        return self._infos(found)

    def by_session(self, session_id: str) -> list[Trace]:
        return self._traces(self._read(rows.select_traces(self._schema), session_id), session_id)

    def trace(self, session_id: str, trace_id: str) -> Trace | None:
        found = self._traces(self._read(rows.select_trace(self._schema), session_id, trace_id), session_id)
        return found[-1] if found else None  # behind those that it builds upon; its id may be kept as an escape

    def last_call_at(self, session_id: str) -> float | None:
        found: list[tuple[float | None]] = self._read(rows.SELECT_LAST_CALL, session_id)
        return found[0][0]

    def session_of(self, trace_id: str) -> str | None:
        found = self._read(rows.SELECT_SESSION_OF, trace_id)
        return found[0][0] if found else None

    def credits(self, session_id: str) -> list[StepCredit]:
        found = self._read(rows.select_credits(self._schema), session_id)
        with self._damage_named(session_id):
            return [rows.row_to_credit(row, session_id) for row in found]

    def _infos(self, found: list[Any]) -> list[SessionInfo]:
        infos = []
        for row in found:
            with self._damage_named(row[0]):
                infos.append(rows.row_to_session(row))
        return infos

    def _traces(self, found: list[Any], session_id: str) -> list[Trace]:
        with self._damage_named(session_id):
            return [trace for _, _, trace in rows.rows_to_traces(found, session_id)]

    @contextmanager
    def _damage_named(self, session_id: str) -> Iterator[None]:
        """Say whose rows they are that cannot be read."""
        try:
            yield
        except UNREADABLE as error:
            raise StoreError(
                f"trace store {self._name}, session {session_id!r}: {error}: it was changed by hand, or damaged: restore a copy"
            ) from error

    def close(self) -> None:
        self._closed = True
        self._close_readers()
        # Last, because only the last connection that may write takes SQLite's -wal file's content over into its own.
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, work: Work[Any, Any, Any], payload: Any) -> Future[Any]:
        if self._writer is None:
            raise StoreError(f"trace store {self._name} was opened with read_only=True: open it again to write")
        return self._writer.submit(work, payload)


def _told(session: SessionRef | None, write: Future[Any]) -> Future[Any]:
    """The write of a session, whose number goes to the reference that lacks it before the next transaction begins."""
    if session is not None and session.number is None:
        write.add_done_callback(session.learn)
    return write


class _Adding:
    """The work of adding traces, which remembers those of its last transactions. It runs in the writer's thread.

    It is told nothing about commits: what it remembers of a transaction that was undone is not found in the database.
    """

    def __init__(self) -> None:
        self._known = KnownTurns()

    def __call__(
        self, connection: SqlConnection, batches: list[tuple[list[Draft], SessionRef | None]]
    ) -> list[int | StoreError | None]:
        seqs = connection.ensure_sessions(_sessions_of(batches))
        results = [_number_or_refusal(batch, session, seqs) for batch, session in batches]
        added = (batch for (batch, _), result in zip(batches, results, strict=True) if isinstance(result, int))
        drafts = list(chain.from_iterable(added))
        packed = _checked(connection, [pack(draft, self._known.base_of(draft)) for draft in drafts], seqs)
        if not connection.insert_traces([_row(item, seqs[item.draft.session_id], base) for item, base in packed]):
            for draft in drafts:
                _put(connection, draft, seqs[draft.session_id])
        self._known.learn(item for item, _ in packed)
        return results


def _sessions_of(batches: Sequence[tuple[list[Draft], SessionRef | None]]) -> dict[str, float | None]:
    """The sessions of what is added, for `ensure_sessions`: one that is known by its number was there, and is not made anew."""
    now = time.time()
    wanted: dict[str, float | None] = {}
    for batch, session in batches:
        for draft in batch:
            if session is None or session.number is None:
                wanted[draft.session_id] = now
            else:
                wanted.setdefault(draft.session_id, None)
    return wanted


def _number_or_refusal(
    batch: list[Draft], session: SessionRef | None, seqs: Mapping[str, int]
) -> int | StoreError | None:
    """The number of the session that traces are added to, `None` for no traces; or why they are not added."""
    if not batch:
        return None
    session_id = batch[0].session_id
    number = seqs.get(session_id)
    refused = None if session is None else session.refusal(session_id, number)
    return refused or number


def _checked(
    connection: SqlConnection, packed: Sequence[PackedTrace], sessions: Mapping[str, int]
) -> list[tuple[PackedTrace, int | None]]:
    """Each with the `seq` of its base, which is in its session, whose number is among these; one stands alone whose base is
    not stored, or not with the content that it had."""
    wanted = [(sessions[base.session_id], base.id, base.digest) for item in packed if (base := item.base)]
    found = connection.bases(wanted) if wanted else {}
    checked: list[tuple[PackedTrace, int | None]] = []
    for item in packed:
        base = item.base
        seq = found.get((sessions[base.session_id], base.id, base.digest)) if base else None
        checked.append((pack(item.draft) if base and seq is None else item, seq))
    return checked


def _row(packed: PackedTrace, session: int, base: int | None) -> Row:
    return (session, base, *rows.trace_to_row(packed)[1:])


def _put(connection: SqlConnection, draft: Draft, session: int) -> None:
    """Insert one trace, whole, or put it in the place of the one that has its id."""
    alone = pack(draft)
    found = connection.execute(rows.FIND_TRACE, (draft.session_id, draft.id)).fetchone()
    if found is None:
        connection.execute(rows.insert_traces(1), _row(alone, session, None))
        return
    [seq] = found
    if connection.execute(rows.IS_A_BASE, (draft.session_id, seq)).fetchone() is not None:
        stored = connection.execute(rows.select_traces(connection.schema), (draft.session_id,)).fetchall()
        for child in rows.rows_to_rewrite(stored, draft.session_id, seq):
            connection.execute(rows.UPDATE_TRACE, child)
    connection.execute(rows.UPDATE_TRACE, (*rows.trace_to_row(alone)[1:], seq))


def _annotate(connection: SqlConnection, batches: list[list[Row]]) -> list[None]:
    # The last word stands, and a statement may not say two about the same.
    latest = {row[:4]: row for row in chain.from_iterable(batches)}
    there = connection.ensure_sessions({session_id: None for session_id, *_ in latest})
    for row in latest.values():
        if row[0] in there:
            connection.execute(rows.UPSERT_CREDIT, row)
    return [None] * len(batches)


def _merge_sessions(connection: SqlConnection, sessions: list[tuple[str, dict[str, Any], float]]) -> list[int]:
    began: dict[str, float | None] = {}
    for session_id, _, created_at in sessions:
        began.setdefault(session_id, created_at)
    seqs = connection.ensure_sessions(began)
    for session_id, metadata, _ in sessions:
        [stored] = connection.execute("SELECT metadata FROM sessions WHERE id = ?", (session_id,)).fetchone()
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
