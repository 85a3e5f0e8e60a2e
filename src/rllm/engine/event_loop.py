"""The event loop that rollouts share: Ctrl-C, unending tasks, blocking calls, stuck rollouts, garbage collection."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from statistics import median
from typing import Any, TypeVar

from rllm._runtime.process import on_ctrl_c
from rllm._runtime.threads import stack_of
from rllm.errors import RolloutError, place_of

T = TypeVar("T")
logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""Seconds that a cancelled rollout may take to clean up; after that it is abandoned with a warning."""

GC_THRESHOLDS = (10_000, 20, 20)
_DEFAULT_GC_THRESHOLDS = (700, 2_000)
"""Python's own first threshold, up to 3.12 and from 3.13."""

_STOPPED = "Event loop stopped before Future completed."
"""Message of asyncio and of uvloop."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work like `asyncio.run`, in an event loop that it shares with users' code.

    Ctrl-C cancels the work, which may then finish; signals that arrive together count as one, and a later one raises
    `KeyboardInterrupt` at once. Other tasks that ignore their cancellation are abandoned with a warning.

    Raises:
        RolloutError: if users' code stopped the loop.
        SystemExit: if users' code or a handler of signals exits, which is logged.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        with asyncio.Runner() as runner:
            loop, tasks = runner.get_loop(), list[asyncio.Task[Any]]()
            try:
                return runner.run(_interruptible(work, tasks))
            finally:
                for task in tasks:
                    _cancel_remaining(loop, task)
    except RuntimeError as error:
        if str(error) != _STOPPED:
            raise
        raise RolloutError(
            "an async agent, environment or reward stopped the event loop (loop.stop()), which all rollouts share: "
            "return instead, or run code that needs its own loop in a thread (await asyncio.to_thread(asyncio.run, "
            "...))"
        ) from error
    except SystemExit as error:  # in a task of users' code, or in a handler of signals
        logger.error("sys.exit(%r) was called%s, which ends all rollouts and the run", error.code, place_of(error))
        raise
    finally:
        # asyncio does not restore the handler after a second Ctrl-C, because it finds ours in place of its own.
        if before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def run_anywhere(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the work and return its result; in a thread with a loop of its own if a loop runs here, as in a notebook.

    Raises:
        RolloutError: if the loop was stopped before the work was done.
        KeyboardInterrupt: on Ctrl-C, which cancels the work; raised once that has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_in_a_loop = False
    else:
        is_in_a_loop = True
    if not is_in_a_loop:
        return run_to_end(work())
    outcome: Future[T] = Future()
    cancel: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        cancel.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work()

    def run() -> None:
        try:
            outcome.set_result(run_to_end(cancellable()))
        except BaseException as error:  # raised in the caller's thread
            outcome.set_exception(error)

    with on_ctrl_c(signal.default_int_handler):  # the loop around us would only cancel its task, which waits for us
        try:
            threading.Thread(target=run, name="rllm training").start()
            # Not `Thread.join`: until 3.13 Python regards a thread as ended once Ctrl-C has interrupted that.
            wait([outcome])
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # the loop has just ended
                cancel.result()()
            wait([outcome])
            raise
    return outcome.result()


async def _interruptible(work: Coroutine[Any, Any, T], tasks: list[asyncio.Task[Any]]) -> T:
    task = asyncio.current_task()
    assert task is not None
    tasks.append(task)
    with on_ctrl_c(signal.getsignal(signal.SIGINT)):  # asyncio's own handler
        return await work


def _cancel_remaining(loop: asyncio.AbstractEventLoop, work: asyncio.Task[Any]) -> None:
    """Cancel all tasks, wait for the work to end, and then for the others as long as they may take."""

    async def ended() -> None:
        await asyncio.wait({work})
        await asyncio.wait({work, *tasks}, timeout=CANCEL_GRACE_S)

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    try:
        loop.run_until_complete(ended())
    finally:
        for task in tasks - {work}:
            if not task.done():
                logger.warning("task %r ignores its cancellation and is abandoned", task.get_name())
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it has just been logged
                asyncio.tasks._unregister_task(task)


@contextmanager
def watched_loop(limit_s: float = 10.0) -> Iterator[None]:
    """Log the stack of the running loop whenever one step of it takes longer than `limit_s` seconds.

    No deadline can end an async agent that blocks the loop, but the log names it.
    """
    loop = asyncio.get_running_loop()
    watched = threading.current_thread()
    ended = threading.Event()
    last_turn = time.monotonic()

    def beat() -> None:
        nonlocal last_turn
        last_turn = time.monotonic()
        if not ended.is_set():
            loop.call_later(limit_s / 4, beat)

    def watch() -> None:
        reported = 0.0
        while not ended.wait(limit_s / 4):
            blocked_s, blocked_since = time.monotonic() - last_turn, last_turn
            if blocked_s > limit_s and reported != blocked_since:
                reported = blocked_since
                logger.error(
                    "the event loop has been blocked for %.0f s, so all rollouts wait: an async agent makes a blocking "
                    "call; make it a sync function, or await asyncio.to_thread(...). It is at:\n%s",
                    blocked_s,
                    stack_of(watched),
                )

    beat()
    threading.Thread(target=watch, name="rllm loop watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Raise the thresholds of the garbage collector, unless the program has chosen its own.

    A rollout creates thousands of objects that live as long as it does. With Python's default of a search every 700
    new objects, a thousand concurrent rollouts spend a sixth of their CPU time on searches that find nothing, and a
    training step of a small policy 3 %.
    """
    before = gc.get_threshold()
    if before[0] not in _DEFAULT_GC_THRESHOLDS:
        yield
        return
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


LEAST_S = 30.0
"""Seconds before a rollout can count as stuck."""
FACTOR = 5.0
"""A rollout is stuck when it has taken this multiple of the median of finished ones."""
_ENOUGH = 4
"""Number of finished rollouts needed for the comparison."""
_LATEST = 256


class UnderWay:
    """Running rollouts and their start times; may be read from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[int, tuple[str, float]] = {}
        self._took: deque[float] = deque(maxlen=_LATEST)
        self._warned: set[int] = set()
        self._count = 0

    @contextmanager
    def one(self, label: str) -> Iterator[None]:
        """Count a rollout with this label as running for the duration of the block."""
        self._count += 1
        number, began = self._count, self._clock()
        self._began[number] = (label, began)
        try:
            yield
        finally:
            del self._began[number]
            self._warned.discard(number)
            self._took.append(self._clock() - began)

    @property
    def num_running(self) -> int:
        return len(self._began)

    def stuck(self) -> dict[str, float]:
        """Return the rollouts that take far longer than others did, with their durations in seconds."""
        return {label: seconds for _, label, seconds in self._stuck()}

    def warn(self) -> None:
        """Log each stuck rollout once."""
        for number, label, seconds in self._stuck():
            if number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "rollout %s has been running for %.0f s, and others took %.3g s: it may be stuck; it is "
                    "cancelled at rollout.timeout_s",
                    label,
                    seconds,
                    median(self._took),
                )

    @asynccontextmanager
    async def watched(self, every_s: float = LEAST_S / 3) -> AsyncIterator[None]:
        """Log stuck rollouts for the duration of the block."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(every_s)
                self.warn()

        watching = asyncio.create_task(watch(), name="rllm stuck rollouts")
        try:
            yield
        finally:
            watching.cancel()

    def _stuck(self) -> list[tuple[int, str, float]]:
        if len(self._took) < _ENOUGH:
            return []
        now, limit = self._clock(), max(LEAST_S, FACTOR * median(self._took))
        ages = [(number, label, now - began) for number, (label, began) in list(self._began.items())]
        return [item for item in ages if item[2] > limit]
