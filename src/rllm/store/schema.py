"""The schema of a SQLite trace store: opening a file safely, and bringing an older one up to date.

A file is ours when its `application_id` says so; `user_version` counts the migrations it has had. Nothing is written to a
file before both are known.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rllm.errors import ConfigError, StoreError

APPLICATION_ID = 0x724C4C4D
"""`rLLM` in ASCII."""

Migration: TypeAlias = tuple[str, ...]
"""Statements that take the schema from one version to the next, in one transaction."""

MIGRATIONS: tuple[Migration, ...] = (
    (
        f"PRAGMA application_id = {APPLICATION_ID}",
        """
        CREATE TABLE sessions (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            created_at REAL NOT NULL,
            metadata BLOB
        )
        """,
        # `seq` is the call order. Ids are unique within a session only, so that a server which repeats its ids cannot
        # overwrite the traces of another rollout.
        """
        CREATE TABLE traces (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            session INTEGER NOT NULL,
            id TEXT NOT NULL,
            call_id TEXT NOT NULL,
            choice_index INTEGER NOT NULL,
            parent_id TEXT,
            model TEXT,
            finish_reason TEXT,
            weight_version INTEGER,
            template_hash TEXT,
            logprobs_kind TEXT,
            started_at REAL,
            error TEXT,
            prompt_ids BLOB NOT NULL,
            response_ids BLOB NOT NULL,
            logprobs BLOB NOT NULL,
            document BLOB NOT NULL,
            UNIQUE (session, id)
        )
        """,
        """
        CREATE TABLE credits (
            session INTEGER NOT NULL,
            trace_id TEXT NOT NULL,
            training_step INTEGER NOT NULL,
            episode_id TEXT NOT NULL,
            trajectory_name TEXT NOT NULL,
            reward REAL,
            group_id TEXT,
            baseline REAL,
            advantage REAL,
            trainer_logprobs BLOB,
            dropped TEXT,
            PRIMARY KEY (session, trace_id, training_step)
        )
        """,
    ),
    # A trace may leave out what it has in common with an earlier one: `base` is that one's `seq`.
    ("ALTER TABLE traces ADD COLUMN base INTEGER", "ALTER TABLE traces ADD COLUMN digest BLOB"),
    # A step has a credit in each trajectory that it belongs to. SQLite changes a primary key only in a new table.
    (
        "ALTER TABLE credits RENAME TO credits_of_steps",
        """
        CREATE TABLE credits (
            session INTEGER NOT NULL,
            trace_id TEXT NOT NULL,
            training_step INTEGER NOT NULL,
            trajectory_index INTEGER NOT NULL,
            episode_id TEXT NOT NULL,
            trajectory_name TEXT NOT NULL,
            reward REAL,
            group_id TEXT,
            baseline REAL,
            advantage REAL,
            trainer_logprobs BLOB,
            dropped TEXT,
            PRIMARY KEY (session, trace_id, training_step, trajectory_index)
        )
        """,
        """
        INSERT INTO credits SELECT session, trace_id, training_step, 0, episode_id, trajectory_name, reward, group_id,
            baseline, advantage, trainer_logprobs, dropped FROM credits_of_steps
        """,
        "DROP TABLE credits_of_steps",
    ),
)

_PLAIN = re.compile(r"CREATE (TABLE|(UNIQUE )?INDEX) ")
_END_OF_NAME = bytes.fromhex("d9d505f920a163d7")
"""End of a rollback journal that names a super-journal, as SQLite's file format has it."""

_REMEDIES = {
    "SQLITE_BUSY": "another process is writing to this file: wait for it, or give each run a file of its own",
    "SQLITE_CANTOPEN": "choose a path in a folder that exists and that you may write to",
    "SQLITE_CORRUPT": "the file is damaged: restore a copy, or salvage it with `sqlite3 FILE .recover`",
    "SQLITE_FULL": "free some space on its disk",
    "SQLITE_INTERRUPT": "reading it does not end: the file is damaged, or was changed by hand: restore a copy",
    "SQLITE_IOERR": "check that its disk is healthy, mounted and not full",
    "SQLITE_NOTADB": "this file was not written by SQLite: choose another path",
    "SQLITE_READONLY": "the file or its folder cannot be written to: choose another path, or open it with read_only=True",
}


def named(error: Exception, path: Path) -> StoreError:
    """The storage's error with the file it concerns and what to do about it."""
    code = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    remedy = f": {_REMEDIES[code]}" if code in _REMEDIES else ""
    return StoreError(f"trace store {str(path)!r}: {error}{remedy}")


def open_for_writing(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection whose commits survive power loss; the file is created or migrated where it has to be.

    Raises:
        ConfigError: if this is a directory.
        StoreError: if this is no trace store, one of a newer version, or one that cannot be written.
    """
    _refuse_directory(path)
    _refuse_journal_of_another(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"trace store {str(path)!r}: its folder cannot be created ({error.strerror}): choose another path"
        ) from error
    connection = _connect(path, "mode=rwc", timeout_s)
    try:
        _version(connection, path)  # before the pragmas below, which write to the file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # on macOS, where a sync ends in the disk's cache; no other has it
        migrate(connection, path, MIGRATIONS)
    except sqlite3.Error as error:
        connection.close()
        raise named(error, path) from error
    except StoreError:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that sees every commit and writes nothing; the file may be in use by another process.

    Raises:
        ConfigError: if this is a directory.
        StoreError: if there is no such file, or if it is no trace store of this version.
    """
    _refuse_directory(path)
    if not path.exists():
        raise StoreError(f"trace store {str(path)!r}: there is no such file: check the path")
    mode = "mode=ro"
    may_write = os.access(path.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    if not may_write and not Path(f"{path}-wal").exists():
        # Readers of a WAL file share an index beside it. Where that cannot be created nobody can be writing either.
        mode += "&immutable=1"
    connection = _connect(path, mode, timeout_s)
    try:
        version = _version(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise named(error, path) from error
    except StoreError:
        connection.close()
        raise
    if version < 1:
        connection.close()
        raise StoreError(f"trace store {str(path)!r} holds nothing: nothing was ever written to it")
    return connection


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    """Run the migrations that this file has not had, all of them or none."""
    connection.execute("BEGIN IMMEDIATE")  # so that two processes opening a new file take turns
    try:
        version = _version(connection, path, newest=len(migrations))
        for migration in migrations[version:]:
            for statement in migration:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _refuse_directory(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(
            f"trace store {str(path)!r} is a directory: name a file in it, such as {str(path / 'traces.db')!r}"
        )


def _refuse_journal_of_another(path: Path) -> None:
    """Refuse a rollback journal that names another file, as no trace store has one: SQLite would delete that file."""
    try:
        with Path(f"{path}-journal").open("rb") as file:
            file.seek(-len(_END_OF_NAME), os.SEEK_END)
            names_another = file.read() == _END_OF_NAME
    except OSError:  # there is none, or it is too short
        return
    if names_another:
        raise StoreError(
            f"trace store {str(path)!r}: its journal {path.name}-journal names another file, which opening the store would "
            "delete: it was not written by rllm"
        )


def _connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    """A connection in autocommit mode, which may move between threads (its users take turns)."""
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
    except sqlite3.Error as error:
        raise named(error, path) from error


def _version(connection: sqlite3.Connection, path: Path, newest: int = len(MIGRATIONS)) -> int:
    """How many migrations this file has had; 0 for an empty one. Another application's file is refused."""
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [num_tables] = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if application_id != APPLICATION_ID and (application_id != 0 or num_tables > 0):
        raise StoreError(
            f"trace store {str(path)!r} is another application's SQLite file (application_id={application_id}, "
            f"{num_tables} tables and indexes): choose another path"
        )
    if version > newest:
        raise StoreError(
            f"trace store {str(path)!r} has schema {version} and this version of rllm knows {newest}: "
            "upgrade rllm, or choose another path"
        )
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
            f"trace store {str(path)!r} has {odd[0]!r}, which is no table or index of rllm's: delete it with sqlite3, or "
            "choose another path"
        )
