"""Which session a model call belongs to: sessions nest, merge their metadata, and remember their calls in call order.

The current session travels in a context variable, so it is right under nesting, in tasks of `asyncio.gather` and, while any
session is open, in threads. What nests is an immutable chain of frames; a `Session` may therefore be entered again, also
by several tasks at once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from rllm.sdk.threads import context_in_threads
from rllm.types import Step, Trace, Trajectory


@dataclass(eq=False, slots=True)
class Call:
    """One model call: reserved when the request leaves, filled when its answer is complete (a choice a trace)."""

    traces: list[Trace] = field(default_factory=list)


class Session:
    """A stretch of work whose model calls belong together; made by `session()`, entered with `with`."""

    def __init__(
        self,
        metadata: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        base_url: str | None = None,
        uids_around: Sequence[str] = (),
    ) -> None:
        """`uids_around`: of the sessions of another process that it belongs to, outermost first."""
        self.metadata = dict(metadata or {})
        """This session's own metadata; `get_current_metadata()` adds that of the sessions around it."""
        self.name = name or f"sess_{uuid.uuid4().hex}"
        """The id that the gateway files the calls under. A session made without a name takes over that of the session
        it is entered in; one made with a name is the root of its own."""
        self.base_url = base_url
        """Where tracked clients are sent while this session is active; `None` leaves them where they are."""
        self.trajectories: list[Trajectory] = []
        """What `@trajectory` functions called inside have done, failed ones included, in the order of the calls."""
        self.elsewhere: list[str] = []
        """URLs of model calls that were made here and went to another server than `base_url`; kept to explain."""
        self.programs: list[str] = []
        """Programs that `run_program` has started here; likewise."""
        self.processes: list[Any] = []
        """Processes of `multiprocessing` that were started here, except workers of pools; likewise."""
        self._uid = f"ctx_{uuid.uuid4().hex[:16]}"
        self._uids = [*uids_around, self._uid]
        self._session_uid_chain = self._uids
        self._own_name = self.name
        self._is_root = name is not None
        self._calls: list[Call] = []
        self._steps: dict[str, Step] = {}
        self._num_open = 0
        self._lock = threading.Lock()

    @property
    def llm_calls(self) -> list[Trace]:
        """The finished calls made in this session and in sessions nested in it, in the order in which they began."""
        return [trace for call in list(self._calls) for trace in call.traces]

    @property
    def steps(self) -> list[Step]:
        """A step per call. The same call gives the same object each time, so that a reward set on it stays."""
        return [self._step(trace) for trace in self.llm_calls]

    def _step(self, trace: Trace) -> Step:
        if trace.id not in self._steps:
            self._steps[trace.id] = Step.from_trace(trace)
        return self._steps[trace.id]

    @property
    def num_begun(self) -> int:
        """How many calls have left, answered or not."""
        return len(self._calls)

    def clear_calls(self) -> None:
        """Forget the calls so far; the sessions around this one keep them."""
        self._calls.clear()
        self._steps.clear()

    def __len__(self) -> int:
        return len(self.llm_calls)

    def __bool__(self) -> bool:
        return True  # a session without calls is a session

    def __repr__(self) -> str:
        return f"Session({self.metadata!r}, name={self.name!r}, calls={len(self)})"

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    def __enter__(self) -> Session:
        is_left_behind = self.base_url is None and has_outlived_rollout()
        frame = Frame.of(self, _current.get() if is_left_behind else current_frame())
        self.name, self._session_uid_chain = frame.name, frame.uids
        with self._lock:
            self._num_open += 1
        context_in_threads.install()
        _current.set(frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Not a token's reset: a session may be left in another context than it was entered in, and in any order (generators).
        _current.set(_without(self, _current.get()))
        context_in_threads.uninstall()
        with self._lock:
            self._num_open -= 1


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a session: the session, what it was entered inside of, and what follows from both."""

    session: Session
    parent: Frame | None
    name: str
    metadata: dict[str, Any]
    """The metadata of the whole chain, inner over outer."""
    base_url: str | None
    uids: list[str]
    """Outermost first."""

    @classmethod
    def of(cls, session: Session, parent: Frame | None) -> Frame:
        if parent is None:
            return cls(session, None, session._own_name, dict(session.metadata), session.base_url, session._uids)
        return cls(
            session,
            parent,
            session._own_name if session._is_root else parent.name,
            {**parent.metadata, **session.metadata},
            session.base_url or parent.base_url,
            [*parent.uids, *session._uids],
        )

    def __iter__(self) -> Iterator[Frame]:
        """This frame and those around it, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    @property
    def sessions(self) -> set[Session]:
        """Those of the whole chain; one that was entered inside itself counts once."""
        return {frame.session for frame in self}

    def reserve_call(self) -> Call:
        """A place among the calls of every session of the chain, taken in the order in which requests leave."""
        call = Call()
        for session in self.sessions:
            session._calls.append(call)
        return call

    def note_elsewhere(self, url: str) -> None:
        """Remember, for error messages, that a model call went past the gateway; queries may hold keys and are left out."""
        url = url.partition("?")[0]
        for session in self.sessions:
            if url not in session.elsewhere:
                session.elsewhere.append(url)

    def note_program(self, name: str) -> None:
        """Remember, for error messages, that a program was to make calls here."""
        for session in self.sessions:
            if name not in session.programs:
                session.programs.append(name)

    def note_process(self, process: Any) -> None:
        """Remember, for error messages, a process that makes its calls in this session."""
        for session in self.sessions:
            session.processes.append(process)


def _without(session: Session, frame: Frame | None) -> Frame | None:
    """The chain without the innermost entry of a session; what was entered inside of it stays what it is."""
    if frame is None or frame.session is session:
        return None if frame is None else frame.parent
    parent = _without(session, frame.parent)
    return frame if parent is frame.parent else replace(frame, parent=parent)


_current: ContextVar[Frame | None] = ContextVar("rllm_session", default=None)


def current_frame() -> Frame | None:
    """The innermost entry whose session is still open.

    A thread that outlives the session it was started in would otherwise go on calling in its name.
    """
    frame = _current.get()
    while frame is not None and not frame.session.is_open:
        frame = frame.parent
    return frame


@contextmanager
def in_no_session() -> Iterator[None]:
    """Leave all sessions meanwhile."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def has_outlived_rollout() -> bool:
    """Whether this is a thread or task that was begun in a session with a gateway, and goes on although that has ended. One that
    has entered another such session meanwhile works for that."""
    led = (entered.session for entered in _current.get() or () if entered.session.base_url is not None)
    innermost = next(led, None)
    return innermost is not None and not innermost.is_open


def session(**metadata: Any) -> Session:
    """A session to be entered: `with session(agent="solver") as sess: ...; sess.llm_calls`.

    Any metadata key may be used, `name` included. A nested session takes over the outer one's name and adds to its
    metadata; the outer session sees the nested one's calls. It may be entered more than once.
    """
    return Session(metadata)


def get_current_session() -> Session | None:
    """The innermost open session, or `None`."""
    frame = current_frame()
    return frame.session if frame else None


def get_current_session_name() -> str | None:
    """The name that calls made here are filed under, or `None` outside of any session."""
    frame = current_frame()
    return frame.name if frame else None


def get_current_metadata() -> dict[str, Any]:
    """The merged metadata of the open sessions, inner over outer; empty outside of any session."""
    frame = current_frame()
    return dict(frame.metadata) if frame else {}


def get_active_session_uids() -> list[str]:
    """The uids of the open sessions, outermost first; empty outside of any session."""
    frame = current_frame()
    return list(frame.uids) if frame else []
