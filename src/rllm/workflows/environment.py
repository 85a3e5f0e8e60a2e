"""The environment of a rollout: created from the task, called in threads or on the event loop, and always closed."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from rllm._runtime.threads import SerialExecutor, SoftLimiter, in_thread, run_in_own_loop
from rllm.environments.base.base_env import BaseEnv
from rllm.errors import EnvError, boundary
from rllm.types import JSONMapping

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds that an environment may take to close, once its call has started."""


@asynccontextmanager
async def environment_of(env_class: type[BaseEnv], row: JSONMapping, calls: BlockingCalls) -> AsyncIterator[BaseEnv]:
    """Create the environment of a task's row, and close it at the end.

    Raises:
        EnvError: if it cannot be created.
    """
    name = f"{env_class.__name__}.from_dict"
    with boundary(EnvError, name):
        env = await _create(env_class, row, calls, name)
    if not hasattr(env, "step"):
        raise EnvError(f"{name} returned {env!r:.100} of type {type(env).__name__}: return an environment")
    try:
        yield env
    finally:
        await _close(env, calls)


async def _create(env_class: type[BaseEnv], row: JSONMapping, calls: BlockingCalls, name: str) -> Any:
    """Return the result of `from_dict`; if the rollout is cancelled meanwhile, close it: it may hold a sandbox."""
    if inspect.iscoroutinefunction(env_class.from_dict):
        return await env_class.from_dict(dict(row))
    made: list[Any] = []  # the code that pops the environment closes it
    abandoned = threading.Event()

    def make() -> Any:
        env = env_class.from_dict(dict(row))
        made.append(env)
        if abandoned.is_set():
            with suppress(IndexError):
                closing = made.pop().close()
                if inspect.isawaitable(closing):
                    run_in_own_loop(closing)
        return env

    try:
        return await calls.call(make, name=name)
    except asyncio.CancelledError:
        abandoned.set()
        with suppress(IndexError):
            await _close(made.pop(), calls)
        raise


async def _close(env: BaseEnv, calls: BlockingCalls) -> None:
    """Close an environment; a failure is logged and does not affect the rollout.

    Cancelling the rollout does not interrupt it, since it may be releasing a sandbox.
    """
    if getattr(type(env), "close", BaseEnv.close) is BaseEnv.close:
        return
    name = f"{type(env).__name__}.close"
    closing = asyncio.create_task(_close_or_log(env, calls, name), name=name)
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=CLOSE_S)
        raise


async def _close_or_log(env: BaseEnv, calls: BlockingCalls, name: str) -> None:
    try:
        await calls.call(env.close, name=name, timeout_s=CLOSE_S)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        logger.warning("%s failed (%s: %s); the rollout is not affected", name, type(error).__name__, error)


SOFT_TIMEOUT_S = 30.0
"""Seconds after which a call no longer delays others."""


class BlockingCalls:
    """At most `max_workers` blocking calls at a time, not counting very long ones; a cancelled call is abandoned."""

    def __init__(
        self, max_workers: int = 64, *, one_thread: bool = False, soft_timeout_s: float = SOFT_TIMEOUT_S
    ) -> None:
        """Run calls in threads, or with `one_thread` one after another in a single thread."""
        self._limiter = SoftLimiter(max_workers, soft_timeout_s=soft_timeout_s)
        self._serial = SerialExecutor(soft_timeout_s=soft_timeout_s) if one_thread else None

    async def call(
        self, function: Callable[..., object], *args: object, name: str, timeout_s: float | None = None
    ) -> Any:
        """Return the function's result; `name` identifies it in messages while it hangs.

        Raises:
            TimeoutError: if it takes longer than `timeout_s` seconds, not counting the wait for its turn.
        """
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(timeout_s):
                return await function(*args)
        call = partial(function, *args)
        if self._serial is not None:
            result = await self._serial.run(call, name=name, timeout_s=timeout_s)
        else:
            async with self._limiter.slot(name), asyncio.timeout(timeout_s):
                result = await in_thread(call, name=name)
        async with asyncio.timeout(timeout_s):
            return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._serial is not None:
            self._serial.close()


_serial_calls: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, type[BaseEnv]], BlockingCalls] = (
    WeakValueDictionary()
)


def calls_of(env_class: type[BaseEnv]) -> BlockingCalls:
    """Return the calls for environments of a class; if these need a single thread, an event loop's users share it."""
    if env_class.is_multithread_safe():
        return BlockingCalls()
    place = asyncio.get_running_loop(), env_class
    calls = _serial_calls.get(place)
    if calls is None:
        calls = _serial_calls[place] = BlockingCalls(one_thread=True)
    return calls
