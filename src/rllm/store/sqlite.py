"""Trace store in one SQLite file: completed writes are durable, and other processes can read it while it is in use.

`application_id` identifies a file of rllm, and `user_version` is the version of its tables. Both are checked before
anything is written to a file.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rllm.errors import ConfigError, StoreError
from rllm.store import rows
from rllm.store.codec import plain_text
from rllm.store.rows import Row
from rllm.store.sql import SqlTraceStore

R = TypeVar("R")
T = TypeVar("T")

APPLICATION_ID = 0x724C4C4D
"""`rLLM` in ASCII."""
TYPES = {
    "key": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "text": "TEXT",
    "integer": "INTEGER",
    "real": "REAL",
    "blob": "BLOB",
}
SIZE = (
    "SELECT (p.page_count - f.freelist_count) * s.page_size "
    "FROM pragma_page_count() p, pragma_freelist_count() f, pragma_page_size() s"
)
"""Query for the number of bytes in use."""
PAGE_BYTES = 2048
"""Traces take 2 to 7 kB; larger pages would waste up to a third of the space."""
_MAX_ROWS = 32
"""Rows per statement: enough to share its overhead, few enough that all sizes stay prepared."""
_ROWS_READ = 64
_ROW_BYTES = 200
_MAX_READ_BYTES = 2 * 1024 * 1024 * 1024
_STEPS_AT_ONCE, _MAX_STEPS = 1_000_000, 400_000_000
"""Steps of SQLite's virtual machine in one query; a query that reads a million rows takes a few million."""
_PLAIN = re.compile(r"CREATE (TABLE|(UNIQUE )?INDEX) ")
_END_OF_NAME = bytes.fromhex("d9d505f920a163d7")
"""End of a rollback journal that names a super-journal, defined by SQLite's file format."""

_REMEDIES = {
    "SQLITE_BUSY": "another process is writing to this file: wait for it, or give each run a file of its own",
    "SQLITE_CANTOPEN": "choose a path in a folder that exists and that you may write to",
    "SQLITE_CORRUPT": "the file is damaged: restore a copy, or salvage it with `sqlite3 FILE .recover`",
    "SQLITE_FULL": "free some space on its disk",
    "SQLITE_INTERRUPT": "reading it does not end, so the file is damaged: restore a copy",
    "SQLITE_IOERR": "check that its disk is healthy, mounted and not full",
    "SQLITE_NOTADB": "this file was not written by SQLite: choose another path",
    "SQLITE_READONLY": "the file or its folder is not writable: choose another path, or open it with read_only=True",
}


class SqliteTraceStore(SqlTraceStore[sqlite3.Connection]):
    """`SqlTraceStore` over SQLite in WAL mode."""

    is_local = True

    def __init__(self, path: str | Path, *, read_only: bool = False, timeout_s: float = 30.0) -> None:
        """Open the file, or create it with its folders.

        Args:
            path: The SQLite file; `~` is the user's home. SQLite keeps `-wal` and `-shm` files next to it while it is
                open.
            read_only: Never write; for looking into a run in progress.
            timeout_s: Seconds to wait for another process's write lock, or for room in the queue.

        Raises:
            ConfigError: if the path is a directory.
            StoreError: if the file cannot be opened as a trace store of this version.
        """
        self.path = Path(path).expanduser().absolute()
        self._timeout_s = timeout_s
        database = None if read_only else _WritableFile(self.path, timeout_s)
        super().__init__(repr(str(self.path)), database, timeout_s=timeout_s)
        self._file = _identity(self.path)

    def _open_reader(self) -> sqlite3.Connection:
        return open_for_reading(self.path, self._timeout_s)

    def num_bytes(self) -> int:
        [[used]] = self._read(SIZE)
        return int(used)

    def _read(self, statement: str, *values: object) -> list[Row]:
        check_is_there(self.path, self._file)  # before a reader of another file could join the pool
        with self._reader() as connection, _bounded(connection):
            found: list[Row] = []
            taken = 0
            try:
                cursor = _execute(connection, statement, values)
                while rows_read := cursor.fetchmany(_ROWS_READ):
                    found += rows_read
                    taken += sum(
                        _ROW_BYTES + sum(len(v) for v in row if isinstance(v, bytes | str)) for row in rows_read
                    )
                    if taken > _MAX_READ_BYTES:
                        raise StoreError(
                            f"trace store {self._name} is damaged (one query has more than {_MAX_READ_BYTES:,} "
                            "bytes): restore a copy of the store"
                        )
            except sqlite3.Error as error:
                raise named(error, self.path) from error
            return found


def _execute(connection: sqlite3.Connection, statement: str, values: Sequence[object]) -> sqlite3.Cursor:
    """Execute a statement; half of a surrogate pair, which SQLite cannot hold, is replaced by its escape."""
    try:
        return connection.execute(statement, values)
    except UnicodeEncodeError:
        return connection.execute(
            statement, [plain_text(value) if isinstance(value, str) else value for value in values]
        )


@contextmanager
def _bounded(connection: sqlite3.Connection) -> Iterator[None]:
    """Limit the steps of one query: pages of a damaged file may refer to each other in circles."""
    rounds = iter(range(_MAX_STEPS // _STEPS_AT_ONCE))
    connection.set_progress_handler(lambda: next(rounds, None) is None, _STEPS_AT_ONCE)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - called for every commit and read; Path.stat takes twice as long
    return found.st_dev, found.st_ino


def check_is_there(path: Path, file: tuple[int, int]) -> None:
    """Raise `StoreError` if the opened file is no longer the one at this path: writes to it would be lost."""
    with suppress(OSError):
        if _identity(path) == file:
            return
    raise StoreError(
        f"trace store {str(path)!r} was deleted, moved or replaced while in use, so writes to it would be lost: put "
        "it back, or start again with a new one"
    )


class _WritableFile:
    """`Database` in a SQLite file."""

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
    """`SqlConnection` to SQLite."""

    lock = ""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
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
            with suppress(sqlite3.OperationalError):  # a full disk ends the whole transaction
                self.execute("RELEASE traces")
        return True


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _MAX_ROWS):
        yield items[start : start + _MAX_ROWS]


def named(error: Exception, path: Path) -> StoreError:
    """Return SQLite's error with the file it concerns and a remedy."""
    code = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    remedy = f": {_REMEDIES[code]}" if code in _REMEDIES else ""
    return StoreError(f"trace store {str(path)!r}: {error}{remedy}")


def open_for_writing(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Return a connection whose commits survive power loss; a missing or empty file gets its tables.

    Raises:
        ConfigError: if the path is a directory.
        StoreError: if the file is not a trace store of this version, or cannot be written.
    """
    _refuse_directory(path)
    _refuse_foreign_journal(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"trace store {str(path)!r}: its folder cannot be created ({error.strerror}): choose another path"
        ) from error
    with _connection(path, "mode=rwc", timeout_s) as connection:
        _check_version(connection, path)  # before the pragmas below, which write to the file
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS only, where a plain sync stops at the disk's cache
        connection.execute("BEGIN IMMEDIATE")  # two processes that open a new file take turns
        if _check_version(connection, path) == 0:
            for statement in rows.create_tables(TYPES):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {rows.SCHEMA}")  # always: only a write detects a read-only file
        connection.execute("COMMIT")
        return connection


def open_for_reading(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Return a connection that sees every commit and writes nothing, also while another process writes the file.

    Raises:
        ConfigError: if the path is a directory.
        StoreError: if the file does not exist, or is not a trace store of this version.
    """
    _refuse_directory(path)
    if not path.exists():
        raise StoreError(f"trace store {str(path)!r}: no such file; check the path")
    mode = "mode=ro"
    may_write = os.access(path.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    if not may_write and not Path(f"{path}-wal").exists():
        # Readers of a WAL file share an index next to it. If that cannot be created, no process can be writing either.
        mode += "&immutable=1"
    with _connection(path, mode, timeout_s) as connection:
        if _check_version(connection, path) == 0:
            raise StoreError(f"trace store {str(path)!r} is empty: nothing was ever written to it")
        return connection


@contextmanager
def _connection(path: Path, mode: str, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """Yield a new connection in autocommit mode, and close it on errors. Several threads may take turns to use it."""
    connection = None
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        yield connection
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise named(error, path) from error
        raise


def _refuse_directory(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(
            f"trace store {str(path)!r} is a directory: name a file in it, such as {str(path / 'traces.db')!r}"
        )


def _refuse_foreign_journal(path: Path) -> None:
    """Refuse a rollback journal that names another file, which SQLite would delete; ours never name one."""
    try:
        with Path(f"{path}-journal").open("rb") as file:
            file.seek(-len(_END_OF_NAME), os.SEEK_END)
            names_another = file.read() == _END_OF_NAME
    except OSError:  # missing or too short
        return
    if names_another:
        raise StoreError(
            f"trace store {str(path)!r}: its journal {path.name}-journal was not written by rllm, and names another "
            "file, which opening the store would delete: remove the journal"
        )


def _check_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of the tables, 0 for an empty file. Files of other programs and versions are refused."""
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [num_tables] = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if application_id != APPLICATION_ID and (application_id != 0 or num_tables > 0):
        raise StoreError(
            f"trace store {str(path)!r} is another application's SQLite file (application_id={application_id}, "
            f"{num_tables} tables and indexes): choose another path"
        )
    if version not in (0, rows.SCHEMA):
        raise rows.wrong_schema(repr(str(path)), version)
    _refuse_programs(connection, path)
    return int(version)


def _refuse_programs(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose schema computes something: a view, a trigger or a generated column may never end."""
    made = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    odd = [name for name, statement in made if not _PLAIN.match(str(statement))]
    for table in () if odd else ("sessions", "traces", "credits"):
        columns = connection.execute(f"PRAGMA table_xinfo({table})").fetchall()
        odd += [f"{table}.{name}" for _, name, *_, hidden in columns if hidden]
    if odd:
        raise StoreError(
            f"trace store {str(path)!r} has {odd[0]!r}, which is not a table or index of rllm: delete it with "
            "sqlite3, or choose another path"
        )
