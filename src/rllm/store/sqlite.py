"""A trace store in one SQLite file: durable before it is acknowledged, readable by other processes while in use."""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rllm.errors import StoreError
from rllm.store import rows
from rllm.store.codec import plain_text
from rllm.store.rows import Row
from rllm.store.schema import named, open_for_reading, open_for_writing
from rllm.store.sql import SqlTraceStore
from rllm.store.writer import GroupCommitWriter

R = TypeVar("R")

_MAX_ROWS = 32
"""Rows to a statement: enough that its overhead is shared, few enough that all sizes stay prepared."""


_ROWS_READ = 64
_ROW_BYTES = 200
_MAX_READ_BYTES = 2 * 1024 * 1024 * 1024
_STEPS_AT_ONCE, _MAX_STEPS = 1_000_000, 400_000_000
"""Of SQLite's machine, in one query; one that reads a million rows takes a few million."""


class SqliteTraceStore(SqlTraceStore):
    """A `SqlTraceStore` over SQLite in WAL mode."""

    is_local = True

    def __init__(self, path: str | Path, *, read_only: bool = False, timeout_s: float = 30.0) -> None:
        """Open the file, or create it with its folders; `~` is the user's home.

        Args:
            path: the SQLite file; SQLite keeps `-wal` and `-shm` files beside it while it is open. An agent that changes the
                folder (`os.chdir`) does not move it.
            read_only: never write; for looking into a run that is going on.
            timeout_s: how long to wait for another process's write lock, or for a place in the queue.

        Raises:
            ConfigError: if the path is a directory.
            StoreError: if the file cannot be opened as a trace store of this version.
        """
        super().__init__()
        self.path = Path(path).expanduser().absolute()
        self._name = repr(str(self.path))
        self._timeout_s = timeout_s
        self._writer = None
        if not read_only:
            self._writer = GroupCommitWriter(_WritableFile(self.path, timeout_s), timeout_s=timeout_s)
            # Runs when the store is collected and when the interpreter ends: what was added is flushed either way.
            weakref.finalize(self, self._writer.close)
        self._idle_readers: list[sqlite3.Connection] = [open_for_reading(self.path, timeout_s)]
        self._file = _identity(self.path)
        weakref.finalize(self, _close_all, self._idle_readers)

    def num_bytes(self) -> int:
        [[used]] = self._read(
            "SELECT (p.page_count - f.freelist_count) * s.page_size "
            "FROM pragma_page_count() p, pragma_freelist_count() f, pragma_page_size() s"
        )
        return int(used)

    def _read(self, statement: str, *values: Any) -> list[Any]:
        with self._reader() as connection, _bounded(connection):
            found: list[Any] = []
            cursor, taken = _execute(connection, statement, values), 0
            while rows_read := cursor.fetchmany(_ROWS_READ):
                found += rows_read
                taken += sum(_ROW_BYTES + sum(len(v) for v in row if isinstance(v, bytes | str)) for row in rows_read)
                if taken > _MAX_READ_BYTES:
                    raise StoreError(
                        f"trace store {self._name}: one query has more than {_MAX_READ_BYTES:,} bytes: it was changed by "
                        "hand, or damaged: restore a copy"
                    )
            return found

    @property
    def _schema(self) -> int:
        [[version]] = self._read("PRAGMA user_version")
        return int(version)

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread is using; as many are kept as were ever needed at once."""
        if self._closed:
            raise StoreError(f"trace store {self._name} is closed: open a new one")
        check_is_there(self.path, self._file)
        try:
            connection = self._idle_readers.pop()
        except IndexError:
            connection = open_for_reading(self.path, self._timeout_s)
        try:
            yield connection
        except sqlite3.Error as error:
            raise named(error, self.path) from error
        finally:
            self._idle_readers.append(connection)
            if self._closed:
                self._close_readers()

    def _close_readers(self) -> None:
        _close_all(self._idle_readers)


def _execute(connection: sqlite3.Connection, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
    """With the escapes of what SQLite has no form for, which is half of a surrogate pair."""
    try:
        return connection.execute(statement, values)
    except UnicodeEncodeError:
        return connection.execute(
            statement, [plain_text(value) if isinstance(value, str) else value for value in values]
        )


@contextmanager
def _bounded(connection: sqlite3.Connection) -> Iterator[None]:
    """Inside, one query makes a bounded number of steps: pages of a file may lead to each other in circles."""
    rounds = iter(range(_MAX_STEPS // _STEPS_AT_ONCE))
    connection.set_progress_handler(lambda: next(rounds, None) is None, _STEPS_AT_ONCE)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - once for every commit and read, and a Path's own takes twice as long
    return found.st_dev, found.st_ino


def check_is_there(path: Path, file: tuple[int, int]) -> None:
    """Raise `StoreError` if the file that was opened is no longer the one at this path: nobody would find what it holds."""
    with suppress(OSError):
        if _identity(path) == file:
            return
    raise StoreError(
        f"trace store {str(path)!r} was deleted, moved or replaced while it was in use, so that nothing written to it is "
        "kept: put it back, or begin again with a new one"
    )


class _WritableFile:
    """A `Database` that is a SQLite file."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._connection = open_for_writing(path, timeout_s)
        self._file = _identity(path)

    def transact(self, body: Callable[[SqliteConnection], R]) -> R:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = body(SqliteConnection(connection))
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # the first error is the one to report
                connection.rollback()
            raise
        check_is_there(self._path, self._file)
        return result

    def is_at_fault(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError | StoreError)

    def named(self, error: Exception) -> StoreError:
        return error if isinstance(error, StoreError) else named(error, self._path)

    def close(self) -> None:
        self._connection.close()


class SqliteConnection:
    """A `SqlConnection` to SQLite."""

    schema = rows.SCHEMA
    lock = ""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return _execute(self._connection, statement, values)

    def ensure_sessions(self, sessions: Mapping[str, float | None]) -> Mapping[str, int]:
        held = {name: plain_text(name) for name in sessions}
        for chunk in _chunks([(held[name], began) for name, began in sessions.items() if began is not None]):
            rows_of = ", ".join(["(?, ?)"] * len(chunk))
            self.execute(
                f"INSERT INTO sessions (id, created_at) VALUES {rows_of} ON CONFLICT (id) DO NOTHING",
                list(chain.from_iterable(chunk)),
            )
        seqs: dict[str, int] = {}
        for names in _chunks(list(held.values())):
            seqs.update(
                self.execute(f"SELECT id, seq FROM sessions WHERE id IN ({', '.join('?' * len(names))})", names)
            )
        return {name: seqs[held[name]] for name in sessions if held[name] in seqs}

    def bases(self, wanted: Sequence[tuple[int, str, bytes]]) -> dict[tuple[int, str, bytes], int]:
        found: dict[tuple[int, str, bytes], int] = {}
        for chunk in _chunks(wanted):
            rows_of = ", ".join(["(?, ?, ?)"] * len(chunk))
            for session, trace_id, digest, seq in self.execute(
                f"WITH wanted (session, id, digest) AS (VALUES {rows_of}) SELECT wanted.*, traces.seq FROM wanted "
                "CROSS JOIN traces ON traces.session = wanted.session AND traces.id = wanted.id "
                "WHERE traces.digest = wanted.digest",
                list(chain.from_iterable(chunk)),
            ):
                found[session, trace_id, digest] = seq
        return found

    def insert_traces(self, values: Sequence[Row]) -> bool:
        self.execute("SAVEPOINT traces")
        try:
            for chunk in _chunks(values):
                self.execute(rows.insert_traces(len(chunk)), list(chain.from_iterable(chunk)))
        except sqlite3.IntegrityError:
            self.execute("ROLLBACK TO traces")
            return False
        finally:
            with suppress(sqlite3.OperationalError):  # a full disk has ended the whole transaction
                self.execute("RELEASE traces")
        return True


T = TypeVar("T")


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _MAX_ROWS):
        yield items[start : start + _MAX_ROWS]
