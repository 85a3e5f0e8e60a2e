"""Sessions, which group model calls, and `@trajectory`, which groups the calls of one function.

Sessions nest, merge their metadata, and keep their calls in call order.

The current session is a context variable, so it is correct in nested sessions, in tasks of `asyncio.gather` and, while
any session is open, in threads. Nesting forms an immutable chain of frames; a `Session` may therefore be entered again,
also by several tasks at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, overload

from rllm.errors import ConfigError
from rllm.sdk.patching import context_in_threads
from rllm.telemetry import Span, agent_span
from rllm.types import JSONMapping, JSONObject, Step, Trace, Trajectory

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

P = ParamSpec("P")


@dataclass(eq=False, slots=True)
class Call:
    """Model call: reserved when the request is sent, filled when its answer is complete (one trace per choice)."""

    traces: list[Trace] = field(default_factory=list)


class Session:
    """Block of work whose model calls belong together; created by `session()`, entered with `with`."""

    def __init__(
        self,
        metadata: JSONMapping | None = None,
        *,
        name: str | None = None,
        base_url: str | None = None,
        uids_around: Sequence[str] = (),
    ) -> None:
        """Create a session; `uids_around` are the uids of enclosing sessions in another process, outermost first."""
        self.metadata = dict(metadata or {})
        """This session's own metadata; `get_current_metadata()` adds the metadata of the sessions around it."""
        self.name = name or f"sess_{uuid.uuid4().hex}"
        """Id under which the gateway stores the calls. A session without a name inherits the id of the session it
        is entered in; one with a name is a root."""
        self.base_url = base_url
        """URL to which tracked clients are redirected while this session is active; `None` leaves them unchanged."""
        self.trajectories: list[Trajectory] = []
        """Trajectories of `@trajectory` functions called inside, failed ones included, in call order."""
        self.elsewhere: list[str] = []
        """URLs of model calls made here that went to another server than `base_url`; for error messages."""
        self.programs: list[str] = []
        """Programs that `run_program` has started here; for error messages."""
        self.processes: list[BaseProcess] = []
        """Processes of `multiprocessing` started here, except workers of pools; for error messages."""
        self._uid = f"ctx_{uuid.uuid4().hex[:16]}"
        self._uids = [*uids_around, self._uid]
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
        calls = self.llm_calls
        for trace in calls:
            if trace.id not in self._steps:
                self._steps[trace.id] = Step.from_trace(trace)
        return [self._steps[trace.id] for trace in calls]

    @property
    def num_begun(self) -> int:
        """Number of calls sent, answered or not."""
        return len(self._calls)

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
        self.name = frame.name
        with self._lock:
            self._num_open += 1
        context_in_threads.install()
        _current.set(frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Not `ContextVar.reset`: generators may leave sessions in any order, and in another context than they entered.
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
    metadata: JSONObject
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

    def note(self, kind: Literal["elsewhere", "programs", "processes"], item: object) -> None:
        """Record, for error messages, something that makes model calls; see the attributes of `Session`."""
        for session in self.sessions:
            if item not in (noted := getattr(session, kind)):
                noted.append(item)


def _without(session: Session, frame: Frame | None) -> Frame | None:
    """Return the chain without the innermost entry of a session; frames entered inside of it keep their values."""
    if frame is None or frame.session is session:
        return None if frame is None else frame.parent
    parent = _without(session, frame.parent)
    return frame if parent is frame.parent else replace(frame, parent=parent)


_current: ContextVar[Frame | None] = ContextVar("rllm_session", default=None)


def current_frame() -> Frame | None:
    """Return the innermost frame whose session is still open.

    A thread that outlives the session it was started in must not add calls to it.
    """
    frame = _current.get()
    while frame is not None and not frame.session.is_open:
        frame = frame.parent
    return frame


@contextmanager
def in_no_session() -> Iterator[None]:
    """Leave all sessions for the duration of the block."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def has_outlived_rollout() -> bool:
    """Return whether the rollout in which this thread or task was started has ended.

    A thread or task that has since entered another session with a gateway belongs to that one.
    """
    led = (entered.session for entered in _current.get() or () if entered.session.base_url is not None)
    innermost = next(led, None)
    return innermost is not None and not innermost.is_open


def session(**metadata: object) -> Session:
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


def get_current_metadata() -> JSONObject:
    """Return the merged metadata of the open sessions, inner over outer; empty outside of any session."""
    frame = current_frame()
    return dict(frame.metadata) if frame else {}


SESSION_UID = "session_uid"
"""Key in a trajectory's info for the session in which its calls were made."""


class _Recorder(Protocol):
    """Type of the decorator: decorated async functions return coroutines of trajectories, others trajectories."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[Any]], /) -> Callable[P, Coroutine[Any, Any, Trajectory]]: ...
    @overload
    def __call__(self, function: Callable[P, Any], /) -> Callable[P, Trajectory]: ...


@overload
def trajectory(name: Callable[P, Awaitable[Any]], /) -> Callable[P, Coroutine[Any, Any, Trajectory]]: ...
@overload
def trajectory(name: Callable[P, Any], /) -> Callable[P, Trajectory]: ...
@overload
def trajectory(name: str = "agent", **metadata: object) -> _Recorder: ...
def trajectory(name: Any = "agent", **metadata: Any) -> Any:
    """Make a function, sync or async, return the `Trajectory` of its work.

    Its `steps` are the model calls in call order, `result` is the function's return value, and `input` its arguments.
    Set its reward yourself. If the function raises, the error propagates with the trajectory so far as its
    `trajectory` attribute; the enclosing session keeps it too, in `trajectories`.

        @trajectory(name="solver")
        async def solve(problem: str) -> str: ...

        solved = await solve("2 + 2")
        solved.reward = float(solved.result == "4")
    """
    if callable(name):
        return _recorded(name, "agent", {})
    return functools.partial(_recorded, name=name, metadata=metadata)


def _recorded(function: Callable[..., object], name: str, metadata: JSONMapping) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"@trajectory on {function.__qualname__}: it is a generator; decorate a function that returns its result"
        )

    def recorded(*args: object, **kwargs: object) -> Trajectory | Coroutine[None, None, Trajectory]:
        own = Session({"trajectory_name": name, **metadata})
        did = Trajectory(name=name, info={**metadata, SESSION_UID: own._uid})
        if frame := current_frame():
            for around in frame.sessions:
                around.trajectories.append(did)
        span = agent_span(name)
        with _recording(own, did, span):
            with contextlib.suppress(TypeError):  # the call itself raises a better error
                bound = inspect.signature(function).bind(*args, **kwargs)
                bound.apply_defaults()
                did.input = {key: value for key, value in bound.arguments.items() if key not in ("self", "cls")}
            did.output = function(*args, **kwargs)
        if inspect.isawaitable(did.output):
            return _awaited(own, did, span)
        span.end()
        return did

    if not inspect.iscoroutinefunction(function):
        return functools.wraps(function)(recorded)

    @functools.wraps(function)
    async def recorded_async(*args: object, **kwargs: object) -> Trajectory:
        did = recorded(*args, **kwargs)
        return did if isinstance(did, Trajectory) else await did

    return recorded_async


async def _awaited(own: Session, did: Trajectory, span: Span) -> Trajectory:
    """Await the output of a function that returned an awaitable, and return the trajectory."""
    with _recording(own, did, span):
        did.output = await did.output
    span.end()
    return did


@contextmanager
def _recording(own: Session, did: Trajectory, span: Span) -> Iterator[None]:
    """Turn model calls inside into steps of the trajectory; an error is recorded there and gets it as an attribute."""
    try:
        with span.active(), own:
            try:
                yield
            finally:
                did.steps = own.steps
                span.note({"gen_ai.conversation.id": own.name, "rllm.num_steps": len(did.steps)})
    except BaseException as error:
        span.end(error)
        if isinstance(error, Exception):
            did.info["error"] = f"{type(error).__name__}: {error}"
            with contextlib.suppress(AttributeError):  # an exception class with slots
                error.trajectory = getattr(error, "trajectory", did)  # type: ignore[attr-defined]
        raise
