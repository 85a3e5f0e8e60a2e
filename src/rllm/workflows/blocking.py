"""Call the methods of users' environments: ordinary ones beside the event loop, coroutine ones on it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from rllm._runtime.threads import OneThread, Places, in_thread
from rllm.environments.base.base_env import BaseEnv

PATIENCE_S = 30.0
"""How long a call may take before it no longer keeps others waiting."""


class BlockingCalls:
    """At most `max_workers` blocking calls at a time, but for those that take very long; a cancelled one is left behind."""

    def __init__(self, max_workers: int = 64, *, one_thread: bool = False, patience_s: float = PATIENCE_S) -> None:
        """`one_thread` runs all of them in one and the same thread, in turn, for what is not thread-safe."""
        self._places = Places(max_workers, patience_s=patience_s)
        self._one = OneThread(patience_s=patience_s) if one_thread else None

    async def call(self, function: Callable[..., Any], *args: Any, name: str, timeout_s: float | None = None) -> Any:
        """The function's result, or what it raised. `name` is what messages call it while it hangs.

        Raises:
            TimeoutError: if it takes longer than `timeout_s` seconds; to wait for its turn does not count.
        """
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(timeout_s):
                return await function(*args)
        call = partial(function, *args)
        if self._one is not None:
            result = await self._one.run(call, name=name, timeout_s=timeout_s)
        else:
            async with self._places.one(name), asyncio.timeout(timeout_s):
                result = await in_thread(call, name=name)
        async with asyncio.timeout(timeout_s):
            return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let the threads end. Repeatable."""
        if self._one is not None:
            self._one.close()


_in_use: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, type[BaseEnv]], BlockingCalls] = WeakValueDictionary()


def calls_of(env_class: type[BaseEnv]) -> BlockingCalls:
    """How to call environments of this class. Where they need one thread, all who ask in one event loop share it."""
    if env_class.is_multithread_safe():
        return BlockingCalls()
    place = asyncio.get_running_loop(), env_class
    calls = _in_use.get(place)
    if calls is None:
        calls = _in_use[place] = BlockingCalls(one_thread=True)
    return calls
