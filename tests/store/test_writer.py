import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rllm.errors import StoreError
from rllm.store.writer import MAX_WAITING, GroupCommitWriter


class Notes:
    """A `Database` in memory."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.execute("CREATE TABLE notes (value INTEGER UNIQUE)")

    def transact(self, body):
        with self.connection:  # commits, or rolls back
            self.connection.execute("BEGIN")
            return body(self.connection)

    def is_at_fault(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError)

    def named(self, error: Exception) -> StoreError:
        return StoreError(f"notes: {error}")

    def close(self) -> None:
        self.connection.close()


@contextmanager
def writer_with(timeout_s: float) -> Iterator[GroupCommitWriter]:
    writer = GroupCommitWriter(Notes(), timeout_s=timeout_s)
    yield writer
    writer.close()


@pytest.fixture
def writer() -> Iterator[GroupCommitWriter]:
    with writer_with(timeout_s=60.0) as writer:
        yield writer


def do(writer: GroupCommitWriter, run):
    """Submit a job of a distinct kind."""
    return writer.submit(lambda connection, payloads: [run(connection) for _ in payloads], None)


class Pause:
    """A job that keeps the writer busy until it is released."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._started, self._released = threading.Event(), threading.Event()
        self.done = do(writer, self._run)
        assert self._started.wait(60)

    def _run(self, connection: sqlite3.Connection) -> bool:
        self._started.set()
        return self._released.wait(60)

    def release(self) -> None:
        self._released.set()


def insert(value: int):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (value,)).lastrowid


def values(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT value FROM notes ORDER BY rowid")]


def test_jobs_run_in_order_and_return_their_results(writer: GroupCommitWriter):
    rows = [do(writer, insert(value)) for value in (30, 10, 20)]
    assert [row.result(60) for row in rows] == [1, 2, 3]
    assert do(writer, values).result(60) == [30, 10, 20]


def test_waiting_jobs_share_one_transaction(writer: GroupCommitWriter):
    pause = Pause(writer)
    changes = [do(writer, lambda connection: connection.total_changes) for _ in range(3)]
    inserted = [do(writer, insert(value)) for value in range(3)]
    in_transaction = do(writer, lambda connection: (connection.in_transaction, connection.total_changes))
    pause.release()
    assert len({future.result(60) for future in changes}) == 1
    assert in_transaction.result(60) == (True, changes[0].result() + 3)
    assert all(future.done() for future in inserted)


def test_failed_job_rolls_back_only_its_own_changes(writer: GroupCommitWriter):
    def insert_twice(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO notes VALUES (7)")
        connection.execute("INSERT INTO notes VALUES (1)")

    pause = Pause(writer)
    first, bad, last = do(writer, insert(1)), do(writer, insert_twice), do(writer, insert(2))
    pause.release()
    assert (first.exception(60), last.exception(60)) == (None, None)
    with pytest.raises(StoreError, match="notes: UNIQUE constraint failed"):
        bad.result(60)
    assert do(writer, values).result(60) == [1, 2]


def test_rejected_job_fails_alone_without_a_retry(writer: GroupCommitWriter):
    together = []

    def insert_but_seven(connection: sqlite3.Connection, payloads: list[int]) -> list[int | StoreError | None]:
        together.append(payloads)
        return [StoreError("no sevens") if payload == 7 else insert(payload)(connection) for payload in payloads]

    pause = Pause(writer)
    first, refused, last = (writer.submit(insert_but_seven, value) for value in (1, 7, 2))
    pause.release()
    assert (first.result(60), last.result(60)) == (1, 2)
    with pytest.raises(StoreError, match="no sevens"):
        refused.result(60)
    assert together == [[1, 7, 2]]


def test_full_queue_blocks_the_caller(writer: GroupCommitWriter):
    pause = Pause(writer)
    for value in range(MAX_WAITING):
        do(writer, insert(value))
    threading.Timer(0.01, pause.release).start()
    do(writer, insert(MAX_WAITING)).result(60)
    assert do(writer, values).result(60) == list(range(MAX_WAITING + 1))


def test_queue_that_stays_full_rejects_the_caller():
    with writer_with(timeout_s=0.05) as writer:
        pause = Pause(writer)
        futures = [do(writer, insert(value)) for value in range(MAX_WAITING)]
        with pytest.raises(StoreError, match=f"{MAX_WAITING} writes"):
            do(writer, insert(-1))
        pause.release()
        assert [future.exception(60) for future in futures] == [None] * MAX_WAITING
        assert do(writer, values).result(60) == list(range(MAX_WAITING))


def test_closing_finishes_waiting_jobs_and_rejects_others(writer: GroupCommitWriter):
    pause = Pause(writer)
    waiting = do(writer, insert(1))
    threading.Timer(0.01, pause.release).start()
    writer.close()
    assert waiting.done()
    with pytest.raises(StoreError, match="closed"):
        do(writer, insert(2))


def test_waiting_job_cannot_be_cancelled(writer: GroupCommitWriter):
    pause = Pause(writer)
    waiting = do(writer, insert(1))
    assert not waiting.cancel()
    pause.release()
    assert waiting.result(60) == 1


def test_adjacent_jobs_of_one_kind_are_batched(writer: GroupCommitWriter):
    together = []

    def note(connection: sqlite3.Connection, payloads: list[int]) -> list[int]:
        together.append(payloads)
        return [payload * 10 for payload in payloads]

    pause = Pause(writer)
    first = [writer.submit(note, value) for value in (1, 2)]
    do(writer, insert(1))
    last = writer.submit(note, 3)
    pause.release()
    assert [job.result(60) for job in [*first, last]] == [10, 20, 30]
    assert together == [[1, 2], [3]]


def test_written_payload_is_released_while_idle(writer: GroupCommitWriter):
    class Payload:
        pass

    payload = Payload()
    there = weakref.ref(payload)
    writer.submit(lambda connection, payloads: [None for _ in payloads], payload).result(60)
    del payload
    deadline = time.monotonic() + 60
    while there() is not None:
        assert time.monotonic() < deadline, "the writer still holds it"
        time.sleep(0.005)
