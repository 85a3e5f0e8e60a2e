"""What ends an event loop in the midst of its tasks: an agent that stops it, which becomes an error that says so; one that exits in
a task of its own, behind which the loop goes on; and Ctrl-C, once for what should end in order, and again for what should end
now. And what would keep it from ending: a task that ignores that it is cancelled."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rllm._runtime.signals import on_ctrl_c
from rllm.engine.runner import CANCEL_GRACE_S
from rllm.errors import RolloutError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STOPPED = "Event loop stopped before Future completed."
"""What event loops say for it, asyncio's and uvloop's."""


def run_to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, for work that shares its event loop with users' code. Ctrl-C cancels it, once where it comes twice at a time.

    Raises:
        RolloutError: if the loop was stopped before the work was done.
    """
    try:
        with _kept_handler(), asyncio.Runner() as runner:
            return _run_through(work, runner)
    except RuntimeError as error:
        if str(error) != _STOPPED:
            raise
        raise RolloutError(
            "an async agent, environment or reward stopped the event loop (loop.stop()), which all rollouts share: let it "
            "return instead, or run what needs a loop of its own in a thread, await asyncio.to_thread(asyncio.run, work())"
        ) from error


def _run_through(work: Coroutine[Any, Any, T], runner: asyncio.Runner) -> T:
    loop = runner.get_loop()
    begun: list[asyncio.Task[T]] = []
    try:
        return runner.run(_hearing_once(work, begun))
    except SystemExit as error:
        ended = error
        # Whoever awaits the task that exited hears of it, as a rollout does; asyncio has let it out of the loop besides.
        while _is_of_a_callback(ended) and not begun[0].done():
            try:
                return loop.run_until_complete(begun[0])
            except SystemExit as another:
                ended = another
            except asyncio.CancelledError:  # as `Runner.run` does it
                raise KeyboardInterrupt from None
        raise ended from None
    finally:
        for task in begun:
            _end_tasks(loop, task)


def _end_tasks(loop: asyncio.AbstractEventLoop, work: asyncio.Task[Any]) -> None:
    """As `Runner.close` does it; but once the work has ended, whoever ignores that is left behind."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    try:
        loop.run_until_complete(_ended(tasks, work))
    finally:
        for task in tasks - {work}:
            if not task.done():
                logger.warning("task %r ignores that it is cancelled, and is left behind", task.get_name())
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it has been told
                asyncio.tasks._unregister_task(task)


async def _ended(tasks: set[asyncio.Task[Any]], work: asyncio.Task[Any]) -> None:
    await asyncio.wait({work})
    await asyncio.wait({work, *tasks}, timeout=CANCEL_GRACE_S)


def _is_of_a_callback(error: SystemExit) -> bool:
    """Whether it comes out of a step of a task, and not of a handler of signals while the loop waits."""
    return any(frame.f_code is asyncio.Handle._run.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


async def _hearing_once(work: Coroutine[Any, Any, T], begun: list[asyncio.Task[T]]) -> T:
    task: asyncio.Task[T] | None = asyncio.current_task()
    assert task is not None
    begun.append(task)
    with on_ctrl_c(signal.getsignal(signal.SIGINT)):  # asyncio's own
        return await work


@contextmanager
def _kept_handler() -> Iterator[None]:
    """Behind a second Ctrl-C asyncio does not put back what was in the place of its own handler, since ours is there then."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


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
