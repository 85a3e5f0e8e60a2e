"""Protocol of trace stores: they keep every captured call durably, and return the calls of a session in call order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rllm.errors import SessionDeletedError
from rllm.types import JSONMapping, JSONObject, StepCredit, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInfo:
    """One session of the store: usually one rollout."""

    id: str
    created_at: float
    """Unix seconds."""
    num_traces: int
    metadata: JSONObject = field(default_factory=dict)
    number: int | None = field(default=None, compare=False, repr=False)
    """Unique in this store, also among deleted sessions of the same id."""


@dataclass(slots=True)
class SessionRef:
    """Reference to one session, for a client that adds one call after another: the id may be reused after a deletion.

    The store fills it in.
    """

    number: int | None = None
    """`SessionInfo.number`, once it is known."""
    is_gone: bool = False
    """True if a write was refused because the session was deleted."""

    def learn(self, write: Future[Any]) -> None:
        """Take the number from a completed write."""
        if self.number is None and write.exception() is None:
            self.number = write.result()

    def refusal(self, session_id: str, number: int | None) -> SessionDeletedError | None:
        """Return an error if this session was deleted; `number` belongs to the session with this id now, if any."""
        if self.number in (None, number):
            return None
        self.is_gone = True
        return SessionDeletedError(f"session {session_id!r} was deleted, so no more traces can be added to it")


class TraceStore(Protocol):
    """Durable storage of traces.

    Writes return a `concurrent.futures.Future` that completes once the data is durable: `.result()` from a thread,
    `await asyncio.wrap_future(...)` from a coroutine. Reads block, see every write whose future has completed, and may
    be made from any thread. All methods raise `StoreError` if the storage fails.
    """

    is_local: bool
    """True if a row is read within microseconds, so that an event loop may wait for it; False across a network."""

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        """Append traces, in call order.

        A session that does not exist is created. A trace whose id is stored already replaces the stored one and keeps
        its order: a client's retry must not count twice. With `session`, all traces must be of that session; if it was
        deleted, nothing is added, and the future raises `SessionDeletedError`. `prompt_ids` may be an `array("I")`;
        they are read as a list.
        """
        ...

    def open_session(
        self,
        session_id: str,
        metadata: JSONMapping,
        *,
        created_at: float | None = None,
        session: SessionRef | None = None,
    ) -> Future[None]:
        """Create a session with metadata, or merge metadata into an existing one.

        Args:
            session_id: Id of the session.
            metadata: Values for its metadata.
            created_at: Unix seconds of its creation, for a session that is copied from another store.
            session: Reference to fill in with this session.
        """
        ...

    def session(self, session_id: str) -> SessionInfo | None:
        """Return the session, or `None` if it does not exist."""
        ...

    def sessions(
        self, *, limit: int = 100, offset: int = 0, oldest_first: bool = False, beyond: int | None = None
    ) -> list[SessionInfo]:
        """Return sessions in the order in which they entered the store, newest first by default.

        Args:
            limit: Maximum number of sessions.
            offset: Number of sessions to skip.
            oldest_first: Reverse the order.
            beyond: Return only those after the session of this number, which may have been deleted.
        """
        ...

    def by_session(self, session_id: str) -> list[Trace]:
        """Return the traces of a session, oldest first; an empty list if it does not exist.

        Traces may share objects, so do not change them.
        """
        ...

    def trace(self, session_id: str, trace_id: str) -> Trace | None:
        """Return one trace of a session without reading all others, or `None` if it does not exist."""
        ...

    def last_call_at(self, session_id: str) -> float | None:
        """Return the start of a session's latest call in Unix seconds, or `None` without calls. No trace is read."""
        ...

    def session_of(self, trace_id: str) -> str | None:
        """Search all sessions for a trace id, and return the id of a session that has it."""
        ...

    def annotate(self, credits: Sequence[StepCredit]) -> Future[None]:
        """Store the trainer's decisions about steps.

        The latest one for a trace, a training step and a trajectory counts. Those for deleted sessions are ignored.
        """
        ...

    def credits(self, session_id: str) -> list[StepCredit]:
        """Return the trainer's decisions about the steps of a session, in call order."""
        ...

    def delete(self, session_id: str) -> int:
        """Delete a session with its traces and their credits, and return the number of traces."""
        ...

    def num_bytes(self) -> int:
        """Return the size of the stored sessions in bytes."""
        ...

    def close(self) -> None:
        """Finish pending writes and release the storage. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


_PAGE = 256


def every_session(store: TraceStore, *, oldest_first: bool = False, run_id: str | None = None) -> Iterator[SessionInfo]:
    """Yield all sessions, read a page at a time, while others may be created or deleted.

    With `run_id`, sessions of other training runs are left out.
    """
    for page in session_pages(store, oldest_first=oldest_first):
        yield from (info for info in page if may_be_of(info.metadata, run_id))


def may_be_of(metadata: JSONMapping, run_id: str | None) -> bool:
    """Return True if a session is of this training run or names none; `None` means any run."""
    return run_id is None or metadata.get("run_id") in (None, run_id)


def session_pages(
    store: TraceStore, *, oldest_first: bool = False, page_size: int = _PAGE
) -> Iterator[list[SessionInfo]]:
    """Yield all sessions in pages."""
    last: int | None = None
    while page := store.sessions(limit=page_size, oldest_first=oldest_first, beyond=last):
        yield page
        last = page[-1].number
