"""`@trajectory`: what one function did, as a `Trajectory` of the model calls made inside it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from rllm.errors import ConfigError
from rllm.sdk.context import Session, current_frame
from rllm.types import Trajectory

P = ParamSpec("P")
R = TypeVar("R")

SESSION_UID = "session_uid"
"""Where a trajectory's info says which session its calls were made in."""


@overload
def trajectory(name: Callable[P, Awaitable[Any]], /) -> Callable[P, Awaitable[Trajectory]]: ...
@overload
def trajectory(name: Callable[P, Any], /) -> Callable[P, Trajectory]: ...
@overload
def trajectory(name: str = "agent", **metadata: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def trajectory(name: Any = "agent", **metadata: Any) -> Any:
    """Make a function, sync or async, return the `Trajectory` of what it did.

    Its `steps` are the model calls in call order, `result` is what the function returned, `input` its arguments, and its
    reward is for you to set. If the function raises, the error travels on, with the trajectory so far as its
    `trajectory` attribute; the session around keeps it too, in `trajectories`.

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
        raise ConfigError(f"@trajectory on {function.__qualname__}: it yields; decorate a function that returns")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def recorded_async(*args: Any, **kwargs: Any) -> Trajectory:
            with _recording(name, metadata) as recorded:
                recorded.input = _arguments(function, args, kwargs)
                recorded.output = await function(*args, **kwargs)
            return recorded

        return recorded_async

    @functools.wraps(function)
    def recorded_sync(*args: Any, **kwargs: Any) -> Trajectory:
        with _recording(name, metadata) as recorded:
            recorded.input = _arguments(function, args, kwargs)
            recorded.output = function(*args, **kwargs)
        return recorded

    return recorded_sync


@contextmanager
def _recording(name: str, metadata: Mapping[str, Any]) -> Iterator[Trajectory]:
    session = Session({"trajectory_name": name, **metadata})
    recorded = Trajectory(name=name, info={**metadata, SESSION_UID: session._uid})
    for frame in current_frame() or ():
        frame.session.trajectories.append(recorded)
    try:
        with session:
            yield recorded
    except Exception as error:
        recorded.info["error"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AttributeError):  # an exception class with slots
            error.trajectory = getattr(error, "trajectory", recorded)  # type: ignore[attr-defined]
        raise
    finally:
        recorded.steps = session.steps


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, defaults included, without the object that a method belongs to."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None  # the call will raise, and say it better
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("self", "cls")}
