"""Running a coroutine from code that is not async, also inside a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from rllm._runtime.process import on_ctrl_c
from rllm.engine.event_loop import run_to_end

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


def run_anywhere(work: Work[T]) -> T:
    """Run the work and return its result, in a thread with a loop of its own if a loop runs here already.

    Raises:
        RolloutError: if the loop was stopped before the work was done.
        KeyboardInterrupt: on Ctrl-C, once the work, which that cancels, has ended.
    """
    return _in_own_thread(work) if _in_a_loop() else run_to_end(work())


def _in_a_loop() -> bool:
    """Return whether an event loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_own_thread(work: Work[T]) -> T:
    outcome: Future[T] = Future()
    stops: list[Callable[[], object]] = []
    is_stopped = threading.Event()

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stops.append(lambda: loop.call_soon_threadsafe(task.cancel))
        if is_stopped.is_set():  # before there was anything to stop
            raise asyncio.CancelledError
        return await work()

    def run() -> None:
        try:
            outcome.set_result(run_to_end(stoppable()))
        except BaseException as error:  # handed to the caller's thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="rllm training")
    try:
        with on_ctrl_c(signal.default_int_handler):  # the loop around us would only cancel its task, which waits for us
            thread.start()
            # Not `thread.join`: until 3.13 Python takes a thread for ended once Ctrl-C has come in its join.
            wait([outcome])
    except KeyboardInterrupt:  # only the main thread hears of Ctrl-C
        is_stopped.set()
        for stop in stops:
            with suppress(RuntimeError):  # the loop has just ended
                stop()
        wait([outcome])
        raise
    return outcome.result()
