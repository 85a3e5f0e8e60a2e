"""`@trajectory`: the work of one function as a `Trajectory` of the model calls made inside it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from rllm.errors import ConfigError
from rllm.sdk.context import Session, current_frame
from rllm.telemetry import Span, agent_span
from rllm.types import Trajectory

P = ParamSpec("P")
R = TypeVar("R")

SESSION_UID = "session_uid"
"""Key in a trajectory's info for the session in which its calls were made."""


class _Recorder(Protocol):
    """Type of the decorator: async functions return coroutines of trajectories, others trajectories."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[Any]], /) -> Callable[P, Coroutine[Any, Any, Trajectory]]: ...
    @overload
    def __call__(self, function: Callable[P, Any], /) -> Callable[P, Trajectory]: ...


@overload
def trajectory(name: Callable[P, Awaitable[Any]], /) -> Callable[P, Coroutine[Any, Any, Trajectory]]: ...
@overload
def trajectory(name: Callable[P, Any], /) -> Callable[P, Trajectory]: ...
@overload
def trajectory(name: str = "agent", **metadata: Any) -> _Recorder: ...
def trajectory(name: Any = "agent", **metadata: Any) -> Any:
    """Make a function, sync or async, return the `Trajectory` of its work.

    Its `steps` are the model calls in call order, `result` is the function's return value, `input` its arguments, and
    its reward is for you to set. If the function raises, the error propagates with the trajectory so far as its
    `trajectory` attribute; the enclosing session keeps it too, in `trajectories`.

        @trajectory(name="solver")
        async def solve(problem: str) -> str: ...

        solved = await solve("2 + 2")
        solved.reward = float(solved.result == "4")
    """
    if callable(name):
        return _recorded(name, "agent", {})
    return functools.partial(_recorded, name=name, metadata=metadata)


def _recorded(function: Callable[..., Any], name: str, metadata: Mapping[str, Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"@trajectory on {function.__qualname__}: it is a generator; decorate a function that returns"
        )

    def recorded(*args: Any, **kwargs: Any) -> Trajectory | Awaitable[Trajectory]:
        session, did = _begun(name, metadata)
        span = agent_span(name)
        with _recording(session, did, span):
            did.input = _arguments(function, args, kwargs)
            did.output = function(*args, **kwargs)
        if inspect.isawaitable(did.output):
            return _awaited(session, did, span)
        span.end()
        return did

    if not inspect.iscoroutinefunction(function):
        return functools.wraps(function)(recorded)

    @functools.wraps(function)
    async def recorded_async(*args: Any, **kwargs: Any) -> Any:
        return await recorded(*args, **kwargs)  # type: ignore[misc]  # an async function returns an awaitable

    return recorded_async


async def _awaited(session: Session, did: Trajectory, span: Span) -> Trajectory:
    """Return the trajectory of a function that has returned an awaitable, in which its work is done."""
    with _recording(session, did, span):
        did.output = await did.output
    span.end()
    return did


def _begun(name: str, metadata: Mapping[str, Any]) -> tuple[Session, Trajectory]:
    """Return a session for one call of the function, and its trajectory, added to the enclosing sessions."""
    session = Session({"trajectory_name": name, **metadata})
    did = Trajectory(name=name, info={**metadata, SESSION_UID: session._uid})
    if frame := current_frame():
        for around in frame.sessions:
            around.trajectories.append(did)
    return session, did


@contextmanager
def _recording(session: Session, did: Trajectory, span: Span) -> Iterator[None]:
    """Turn model calls inside into steps of the trajectory; an error is recorded there and carries it."""
    try:
        with span.active(), session:
            try:
                yield
            finally:
                did.steps = session.steps
                span.note({"gen_ai.conversation.id": session.name, "rllm.num_steps": len(did.steps)})
    except BaseException as error:
        span.end(error)
        if isinstance(error, Exception):
            did.info["error"] = f"{type(error).__name__}: {error}"
            with contextlib.suppress(AttributeError):  # an exception class with slots
                error.trajectory = getattr(error, "trajectory", did)  # type: ignore[attr-defined]
        raise


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name, defaults included, without `self` or `cls`."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None  # the call itself raises a better error
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("self", "cls")}
