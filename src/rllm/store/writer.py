"""Group commit: one thread owns a database and commits all waiting jobs in one transaction.

A durable commit costs a disk flush, however many rows it has. While one flush runs, the next jobs gather, so that the
cost of each falls as the load rises. Jobs of one kind are executed together, because every statement releases the
interpreter's lock and may wait milliseconds for it when another thread is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from rllm.errors import StoreError

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
P = TypeVar("P")
T = TypeVar("T")

Work: TypeAlias = Callable[[C, list[P]], Sequence[T | StoreError]]
"""Executes several jobs of one kind: takes a connection and their payloads, returns a result or an error for each."""

MAX_WAITING = 16_384
"""Number of waiting jobs at which `submit` blocks: backpressure instead of dropped traces."""


class Database(Protocol[C_co]):
    """Storage that a writer commits to."""

    def transact(self, body: Callable[[C_co], T]) -> T:
        """Run `body` in one transaction. Its changes are durable on return, and rolled back if it raises."""
        ...

    def is_at_fault(self, error: Exception) -> bool:
        """Return True if the storage failed, and with it the whole transaction, rather than one of the jobs."""
        ...

    def named(self, error: Exception) -> StoreError:
        """Return the error with the name of the storage and a remedy."""
        ...

    def close(self) -> None: ...


class _Job(NamedTuple):
    work: Work[Any, Any, Any]
    payload: Any
    done: Future[Any]


class GroupCommitWriter(Generic[C]):
    """Runs jobs in the order of their arrival; the future of each completes when its changes are on disk."""

    def __init__(self, database: Database[C], *, timeout_s: float) -> None:
        self._database = database
        self._timeout_s = timeout_s
        self._waiting: list[_Job] = []
        self._closed = False
        # Re-entrant, because the garbage collector may close a forgotten store while this thread holds it.
        lock = threading.RLock()
        self._has_work, self._has_room = threading.Condition(lock), threading.Condition(lock)
        # A daemon, so that a store that was not closed cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="rllm-trace-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work[C, P, T], payload: P) -> Future[T]:
        """Queue a job for the next transaction; raise `StoreError` if the writer is closed, or full for too long."""
        job = _Job(work, payload, Future())
        # From here on the job cannot be cancelled: a client that disconnects must not undo a write.
        job.done.set_running_or_notify_cancel()
        with self._has_room:
            in_time = self._has_room.wait_for(lambda: self._closed or len(self._waiting) < MAX_WAITING, self._timeout_s)
            if self._closed:
                raise StoreError("this trace store is closed: open a new one")
            if not in_time:
                reason = f"{MAX_WAITING} writes are waiting and none finished within {self._timeout_s:g} s"
                raise self._database.named(TimeoutError(f"{reason}: the disk is too slow or the file is locked"))
            self._waiting.append(job)
            self._has_work.notify()
        return job.done

    def close(self) -> None:
        """Finish every waiting job and close the connection."""
        with self._has_work:
            self._closed = True
            self._has_work.notify()
            self._has_room.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: self._closed or self._waiting)
                batch, self._waiting = self._waiting, []
                self._has_room.notify_all()
            if not batch:  # closed, and finished
                break
            self._commit(batch)
            del batch  # keep no payload alive while waiting
        self._database.close()

    def _commit(self, batch: list[_Job]) -> None:
        try:
            results = self._database.transact(
                lambda connection: [
                    result
                    for work, jobs in groupby(batch, key=attrgetter("work"))
                    for result in work(connection, [job.payload for job in jobs])
                ]
            )
        except Exception as error:
            if len(batch) > 1 and not self._database.is_at_fault(error):
                # The storage works, so one of these jobs is at fault: let it fail alone.
                for job in batch:
                    self._commit([job])
                return
            for job in batch:
                job.done.set_exception(self._database.named(error))
            return
        for job, result in zip(batch, results, strict=True):
            if isinstance(result, StoreError):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)
