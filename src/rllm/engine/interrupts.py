"""What ends an event loop in the midst of its tasks: an agent that stops it, which becomes an error that says so; and a second
Ctrl-C, after which nobody wants to read of every task that it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rllm.errors import RolloutError

T = TypeVar("T")

_STOPPED = "Event loop stopped before Future completed."
"""What event loops say for it, asyncio's and uvloop's."""


def run_to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, for work that shares its event loop with users' code.

    Raises:
        RolloutError: if the loop was stopped before the work was done.
    """
    try:
        return asyncio.run(work)
    except RuntimeError as error:
        if str(error) != _STOPPED:
            raise
        raise RolloutError(
            "an async agent, environment or reward stopped the event loop (loop.stop()), which all rollouts share: let it "
            "return instead, or run what needs a loop of its own in a thread, await asyncio.to_thread(asyncio.run, work())"
        ) from error


def say_nothing_of_interrupted_tasks() -> None:
    """From here on the running loop does not log tasks that `KeyboardInterrupt` has ended; asyncio raises it where it happens
    to be, so that nobody awaits them any more."""
    asyncio.get_running_loop().set_exception_handler(_tell)


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not _is_interrupt(context.get("exception")):
        loop.default_exception_handler(context)


def _is_interrupt(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(KeyboardInterrupt)[1] is None
    return isinstance(error, KeyboardInterrupt)
