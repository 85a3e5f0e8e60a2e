"""An environment for as long as a rollout takes: made from the task, and closed however it ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rllm.environments.base.base_env import BaseEnv
from rllm.errors import EnvError, boundary
from rllm.workflows.blocking import BlockingCalls

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long an environment may take to close, once its turn has come."""


@asynccontextmanager
async def environment_of(
    env_class: type[BaseEnv], row: Mapping[str, Any], calls: BlockingCalls
) -> AsyncIterator[BaseEnv]:
    """The environment of a task's row.

    Raises:
        EnvError: if it cannot be made.
    """
    name = f"{env_class.__name__}.from_dict"
    with boundary(EnvError, name):
        env = await _made(env_class, row, calls, name)
    if not hasattr(env, "step"):
        raise EnvError(f"{name} returned {env!r:.100} of type {type(env).__name__}: return an environment")
    try:
        yield env
    finally:
        await _close(env, calls)


async def _made(env_class: type[BaseEnv], row: Mapping[str, Any], calls: BlockingCalls, name: str) -> Any:
    """What `from_dict` returns. If nobody waits for it any more when it does, it is closed: it may hold a sandbox."""
    if inspect.iscoroutinefunction(env_class.from_dict):
        return await env_class.from_dict(dict(row))
    made: list[Any] = []  # whoever takes it out closes it, and nobody else does
    abandoned = threading.Event()

    def make() -> Any:
        env = env_class.from_dict(dict(row))
        made.append(env)
        if abandoned.is_set():
            with suppress(IndexError):
                _close_in_thread(made.pop())
        return env

    try:
        return await calls.call(make, name=name)
    except asyncio.CancelledError:
        abandoned.set()
        with suppress(IndexError):
            await _close(made.pop(), calls)
        raise


def _close_in_thread(env: BaseEnv) -> None:
    closing: Any = env.close()  # type: ignore[func-returns-value]
    if inspect.isawaitable(closing):
        asyncio.run(_finished(closing))


async def _finished(closing: Awaitable[object]) -> None:
    await closing


async def _close(env: BaseEnv, calls: BlockingCalls) -> None:
    """Close it; one that will not is left behind, and the rollout is not affected. A rollout that is cancelled meanwhile does
    not break it off: it may be giving back a sandbox."""
    if getattr(type(env), "close", BaseEnv.close) is BaseEnv.close:
        return
    name = f"{type(env).__name__}.close"
    closing = asyncio.create_task(_close_or_tell(env, calls, name), name=name)
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=CLOSE_S)
        raise


async def _close_or_tell(env: BaseEnv, calls: BlockingCalls, name: str) -> None:
    try:
        await calls.call(env.close, name=name, timeout_s=CLOSE_S)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        logger.warning("%s failed (%s: %s); the rollout is not affected", name, type(error).__name__, error)
