"""A second Ctrl-C, which ends tasks in their midst: whoever pressed it need not hear of each."""

from __future__ import annotations

import asyncio
from typing import Any


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
