"""Trace store in the memory of this process, for tests and for runs whose traces are not needed afterwards."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import Future
from typing import TypeVar

from rllm.errors import StoreError
from rllm.store.rows import Row, create_tables
from rllm.store.sql import SqlConnection, SqlTraceStore
from rllm.store.sqlite import PAGE_BYTES, SIZE, TYPES, SqliteConnection
from rllm.store.writer import Work

P = TypeVar("P")
T = TypeVar("T")


class MemoryTraceStore(SqlTraceStore[sqlite3.Connection]):
    """`SqlTraceStore` over a database in memory. Writes are complete when they return."""

    is_local = True

    def __init__(self) -> None:
        self._lock = threading.RLock()  # there is one connection, as each one would have a database of its own
        super().__init__("'memory:'", None, timeout_s=0.0)

    def _open_reader(self) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        for statement in (f"PRAGMA page_size = {PAGE_BYTES}", *create_tables(TYPES)):
            connection.execute(statement)
        return connection

    def num_bytes(self) -> int:
        [[used]] = self._read(SIZE)
        return int(used)

    def _read(self, statement: str, *values: object) -> list[Row]:
        with self._lock, self._reader() as connection:
            return SqliteConnection(connection).execute(statement, values).fetchall()

    def _write(self, work: Work[SqlConnection, P, T], payload: P) -> Future[T]:
        done: Future[T] = Future()
        result: T | StoreError
        with self._lock, self._reader() as connection:
            try:
                with connection:  # commits, or rolls back
                    connection.execute("BEGIN")
                    [result] = work(SqliteConnection(connection), [payload])
            except Exception as error:
                result = error if isinstance(error, StoreError) else StoreError(f"trace store {self._name}: {error}")
        if isinstance(result, StoreError):
            done.set_exception(result)
        else:
            done.set_result(result)
        return done
