import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rllm.errors import StoreError
from rllm.store.writer import MAX_WAITING, GroupCommitWriter


@contextmanager
def writer_with(timeout_s: float) -> Iterator[GroupCommitWriter]:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE notes (value INTEGER UNIQUE)")
    writer = GroupCommitWriter(connection, name_error=lambda error: StoreError(f"notes: {error}"), timeout_s=timeout_s)
    yield writer
    writer.close()


@pytest.fixture
def writer() -> Iterator[GroupCommitWriter]:
    with writer_with(timeout_s=30.0) as writer:
        yield writer


class Pause:
    """A job that keeps the writer busy until it is released."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._started, self._released = threading.Event(), threading.Event()
        self.done = writer.submit(self._run)
        assert self._started.wait(30)

    def _run(self, connection: sqlite3.Connection) -> bool:
        self._started.set()
        return self._released.wait(30)

    def release(self) -> None:
        self._released.set()


def insert(value: int):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (value,)).lastrowid


def values(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT value FROM notes ORDER BY rowid")]


def test_jobs_run_in_order_and_give_their_results(writer: GroupCommitWriter):
    rows = [writer.submit(insert(value)) for value in (30, 10, 20)]
    assert [row.result(30) for row in rows] == [1, 2, 3]
    assert writer.submit(values).result(30) == [30, 10, 20]


def test_everything_that_is_waiting_shares_one_transaction(writer: GroupCommitWriter):
    pause = Pause(writer)
    changes = [writer.submit(lambda connection: connection.total_changes) for _ in range(3)]
    inserted = [writer.submit(insert(value)) for value in range(3)]
    in_transaction = writer.submit(lambda connection: (connection.in_transaction, connection.total_changes))
    pause.release()
    assert len({future.result(30) for future in changes}) == 1
    assert in_transaction.result(30) == (True, changes[0].result() + 3)
    assert all(future.done() for future in inserted)


def test_a_job_that_fails_takes_back_its_own_changes_only(writer: GroupCommitWriter):
    def insert_twice(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO notes VALUES (7)")
        connection.execute("INSERT INTO notes VALUES (1)")

    pause = Pause(writer)
    first, bad, last = writer.submit(insert(1)), writer.submit(insert_twice), writer.submit(insert(2))
    pause.release()
    assert (first.exception(30), last.exception(30)) == (None, None)
    with pytest.raises(StoreError, match="notes: UNIQUE constraint failed"):
        bad.result(30)
    assert writer.submit(values).result(30) == [1, 2]


def test_a_full_queue_makes_the_caller_wait_until_there_is_room(writer: GroupCommitWriter):
    pause = Pause(writer)
    for value in range(MAX_WAITING):
        writer.submit(insert(value))
    threading.Timer(0.01, pause.release).start()
    writer.submit(insert(MAX_WAITING)).result(30)
    assert writer.submit(values).result(30) == list(range(MAX_WAITING + 1))


def test_a_queue_that_stays_full_refuses_the_caller_and_keeps_the_rest():
    with writer_with(timeout_s=0.05) as writer:
        pause = Pause(writer)
        futures = [writer.submit(insert(value)) for value in range(MAX_WAITING)]
        with pytest.raises(StoreError, match=f"{MAX_WAITING} writes are waiting and none was finished within 0.05 s"):
            writer.submit(insert(-1))
        pause.release()
        assert [future.exception(30) for future in futures] == [None] * MAX_WAITING
        assert writer.submit(values).result(30) == list(range(MAX_WAITING))


def test_closing_finishes_what_is_waiting_and_refuses_the_rest(writer: GroupCommitWriter):
    pause = Pause(writer)
    waiting = writer.submit(insert(1))
    threading.Timer(0.01, pause.release).start()
    writer.close()
    assert waiting.done()
    with pytest.raises(StoreError, match="closed"):
        writer.submit(insert(2))


def test_a_job_that_is_waiting_cannot_be_cancelled(writer: GroupCommitWriter):
    pause = Pause(writer)
    waiting = writer.submit(insert(1))
    assert not waiting.cancel()
    pause.release()
    assert waiting.result(30) == 1
