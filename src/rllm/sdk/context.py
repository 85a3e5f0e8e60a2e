"""Sessions, to which model calls belong: they nest, merge their metadata, and keep their calls in call order.

The current session is a context variable, so it is right under nesting, in tasks of `asyncio.gather` and, while any
session is open, in threads. Nesting forms an immutable chain of frames; a `Session` may therefore be entered again,
also by several tasks at once.
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

from rllm.sdk.patching import context_in_threads
from rllm.types import Step, Trace, Trajectory


@dataclass(eq=False, slots=True)
class Call:
    """Model call: reserved when the request is sent, filled when its answer is complete (one trace per choice)."""

    traces: list[Trace] = field(default_factory=list)


class Session:
    """Block of work whose model calls belong together; created by `session()`, entered with `with`."""

    def __init__(
        self,
        metadata: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        base_url: str | None = None,
        uids_around: Sequence[str] = (),
    ) -> None:
        """Create a session; `uids_around` are those of enclosing sessions of another process, outermost first."""
        self.metadata = dict(metadata or {})
        """This session's own metadata; `get_current_metadata()` adds that of the sessions around it."""
        self.name = name or f"sess_{uuid.uuid4().hex}"
        """Id under which the gateway stores the calls. A session without a name inherits that of the session it is
        entered in; one with a name is a root."""
        self.base_url = base_url
        """URL to which tracked clients are redirected while this session is active; `None` leaves them unchanged."""
        self.trajectories: list[Trajectory] = []
        """Trajectories of `@trajectory` functions called inside, failed ones included, in call order."""
        self.elsewhere: list[str] = []
        """URLs of model calls made here that went to another server than `base_url`; for error messages."""
        self.programs: list[str] = []
        """Programs that `run_program` has started here; for error messages."""
        self.processes: list[Any] = []
        """Processes of `multiprocessing` started here, except workers of pools; for error messages."""
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
        """Finished calls of this session and of sessions nested in it, in the order of their start."""
        return [trace for call in list(self._calls) for trace in call.traces]

    @property
    def steps(self) -> list[Step]:
        """One step per call; the same call always has the same step, so that a reward set on it stays."""
        return [self._step(trace) for trace in self.llm_calls]

    def _step(self, trace: Trace) -> Step:
        if trace.id not in self._steps:
            self._steps[trace.id] = Step.from_trace(trace)
        return self._steps[trace.id]

    @property
    def num_begun(self) -> int:
        """Number of calls sent, answered or not."""
        return len(self._calls)

    def clear_calls(self) -> None:
        """Remove the calls so far; the enclosing sessions keep them."""
        self._calls.clear()
        self._steps.clear()

    def __len__(self) -> int:
        return len(self.llm_calls)

    def __bool__(self) -> bool:
        return True  # a session without calls is still true

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
        # Not a token's reset: generators may leave a session in another context than they entered it, and in any order.
        _current.set(_without(self, _current.get()))
        context_in_threads.uninstall()
        with self._lock:
            self._num_open -= 1


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a session: the session, the frame it was entered in, and values derived from both."""

    session: Session
    parent: Frame | None
    name: str
    metadata: dict[str, Any]
    """Metadata of the whole chain, inner over outer."""
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
        """Iterate over this frame and the enclosing ones, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    @property
    def sessions(self) -> set[Session]:
        """Sessions of the whole chain."""
        return {frame.session for frame in self}

    def reserve_call(self) -> Call:
        """Add a call to every session of the chain, in the order in which requests are sent."""
        call = Call()
        for session in self.sessions:
            session._calls.append(call)
        return call

    def note_elsewhere(self, url: str) -> None:
        """Record a model call that bypassed the gateway for error messages, without its query, which may hold keys."""
        url = url.partition("?")[0]
        for session in self.sessions:
            if url not in session.elsewhere:
                session.elsewhere.append(url)

    def note_program(self, name: str) -> None:
        """Record, for error messages, a program that should make calls here."""
        for session in self.sessions:
            if name not in session.programs:
                session.programs.append(name)

    def note_process(self, process: Any) -> None:
        """Record, for error messages, a process that makes its calls in this session."""
        for session in self.sessions:
            session.processes.append(process)


def _without(session: Session, frame: Frame | None) -> Frame | None:
    """Return the chain without the innermost entry of a session; frames entered inside of it keep their values."""
    if frame is None or frame.session is session:
        return None if frame is None else frame.parent
    parent = _without(session, frame.parent)
    return frame if parent is frame.parent else replace(frame, parent=parent)


_current: ContextVar[Frame | None] = ContextVar("rllm_session", default=None)


def current_frame() -> Frame | None:
    """Return the innermost frame whose session is still open.

    A thread that outlives the session it was started in must not keep calling in its name.
    """
    frame = _current.get()
    while frame is not None and not frame.session.is_open:
        frame = frame.parent
    return frame


@contextmanager
def in_no_session() -> Iterator[None]:
    """Leave all sessions while inside."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def has_outlived_rollout() -> bool:
    """Return whether the rollout in which this thread or task was started has ended.

    One that has entered another session with a gateway since then belongs to that.
    """
    led = (entered.session for entered in _current.get() or () if entered.session.base_url is not None)
    innermost = next(led, None)
    return innermost is not None and not innermost.is_open


def session(**metadata: Any) -> Session:
    """Return a session to enter with `with`.

        with session(agent="solver") as sess:
            ...
        sess.llm_calls

    Any metadata key may be used, `name` included. A nested session inherits the outer one's name and metadata; the
    outer session includes the nested one's calls. It may be entered more than once.
    """
    return Session(metadata)


def get_current_session() -> Session | None:
    """Return the innermost open session, or `None`."""
    frame = current_frame()
    return frame.session if frame else None


def get_current_session_name() -> str | None:
    """Return the name under which calls made here are stored, or `None` outside of any session."""
    frame = current_frame()
    return frame.name if frame else None


def get_current_metadata() -> dict[str, Any]:
    """Return the merged metadata of the open sessions, inner over outer; empty outside of any session."""
    frame = current_frame()
    return dict(frame.metadata) if frame else {}


def get_active_session_uids() -> list[str]:
    """Return the uids of the open sessions, outermost first; empty outside of any session."""
    frame = current_frame()
    return list(frame.uids) if frame else []
