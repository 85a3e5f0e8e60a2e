"""What a trace store does: keep every captured call durably, and hand a session's calls back in call order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rllm.errors import SessionDeletedError
from rllm.types import StepCredit, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInfo:
    """One session of the store: usually one rollout."""

    id: str
    created_at: float
    """Unix seconds."""
    num_traces: int
    metadata: dict[str, Any] = field(default_factory=dict)
    number: int | None = field(default=None, compare=False, repr=False)
    """This store gives it to no other session, not even to a later one of the same id."""


@dataclass(slots=True)
class SessionRef:
    """Which session of an id is meant, by whoever adds to it call by call: another may have the id once it is deleted.

    A store fills it in.
    """

    number: int | None = None
    """`SessionInfo.number`; `None` until it is known."""
    is_gone: bool = False
    """Whether something was not added, because the session was deleted."""

    def learn(self, write: Future[Any]) -> None:
        """Take over the number that a write gives, once it is durable."""
        if self.number is None and write.exception() is None:
            self.number = write.result()

    def refusal(self, session_id: str, number: int | None) -> SessionDeletedError | None:
        """Why nothing is added where the session of this id has this number by now, or is not there; `None` if it is this one."""
        if self.number in (None, number):
            return None
        self.is_gone = True
        return SessionDeletedError(f"the session {session_id!r} was deleted meanwhile: nothing more is added to it")


class TraceStore(Protocol):
    """Durable home of traces.

    Writes return a `concurrent.futures.Future` that completes once the data is durable: `.result()` from a thread,
    `await asyncio.wrap_future(...)` from a coroutine. Reads block, see every write whose future has completed, and may
    be made from any thread. All methods raise `StoreError` for what the storage itself refuses.
    """

    is_local: bool
    """Whether one row is read within microseconds, so that an event loop may wait for it; false across a network."""

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        """Append traces, in call order. A session that does not exist yet is created; an id that is already stored is
        replaced in place, keeping its order (a client's retry must not count twice).

        With `session` all traces are of that very session: where anybody has deleted it, nothing is added, and the future
        raises `SessionDeletedError`."""
        ...

    def open_session(
        self,
        session_id: str,
        metadata: Mapping[str, Any],
        *,
        created_at: float | None = None,
        session: SessionRef | None = None,
    ) -> Future[None]:
        """Create a session with metadata, or merge metadata into an existing one; `created_at` (Unix seconds) says when
        one began that is copied from another store, and `session` is told which one it is."""
        ...

    def session(self, session_id: str) -> SessionInfo | None:
        """The session, or `None` if it is unknown."""
        ...

    def sessions(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        oldest_first: bool = False,
        beyond: int | None = None,
        created_before: float | None = None,
    ) -> list[SessionInfo]:
        """Sessions in the order in which they came into the store, newest first unless told otherwise.

        Args:
            limit, offset: how many, and how many are passed over.
            oldest_first: the other way round.
            beyond: those behind the session of this number, which need not be there any more.
            created_before: those that began before then, in Unix seconds; copied ones came later than they began.
        """
        ...

    def by_session(self, session_id: str) -> list[Trace]:
        """The traces of a session, oldest first; an empty list if it is unknown. They may share what they have in common,
        so change none of them."""
        ...

    def trace(self, session_id: str, trace_id: str) -> Trace | None:
        """One trace of a session, or `None` if it is unknown; the others are not read."""
        ...

    def last_call_at(self, session_id: str) -> float | None:
        """When the latest call of a session began, in Unix seconds, or `None` if it has none; no trace is read for that."""
        ...

    def session_of(self, trace_id: str) -> str | None:
        """A session that has a trace of this id; it is looked for among all of them."""
        ...

    def annotate(self, credits: Sequence[StepCredit]) -> Future[None]:
        """Keep what the trainer decided about steps; the last word on a trace in a training step and a trajectory stands. What
        is said of a session that is not there, because it was deleted, is passed over."""
        ...

    def credits(self, session_id: str) -> list[StepCredit]:
        """What the trainer decided about this session's steps, in call order."""
        ...

    def delete(self, session_id: str) -> int:
        """Remove a session, its traces and their credits; returns how many traces went."""
        ...

    def num_bytes(self) -> int:
        """How much room the sessions take where they are kept."""
        ...

    def close(self) -> None:
        """Finish pending writes and release the storage. Closing twice is allowed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


_PAGE = 256


def every_session(store: TraceStore, *, oldest_first: bool = False, run_id: str | None = None) -> Iterator[SessionInfo]:
    """All sessions, whatever begins or is deleted meanwhile; they are read a page at a time. With `run_id` those of other
    training runs are left out."""
    for page in session_pages(store, oldest_first=oldest_first):
        yield from (info for info in page if may_be_of(info.metadata, run_id))


def may_be_of(metadata: Mapping[str, Any], run_id: str | None) -> bool:
    """Whether a session is of this training run, or of none that it names; `None` is any run."""
    return run_id is None or metadata.get("run_id") in (None, run_id)


def session_pages(
    store: TraceStore,
    *,
    oldest_first: bool = False,
    page_size: int = _PAGE,
    created_before: float | None = None,
) -> Iterator[list[SessionInfo]]:
    """`every_session`, by pages; `created_before` as for `TraceStore.sessions`."""
    last: int | None = None
    while page := store.sessions(
        limit=page_size, oldest_first=oldest_first, beyond=last, created_before=created_before
    ):
        yield page
        last = page[-1].number
