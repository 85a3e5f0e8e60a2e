"""Blocking functions alongside an event loop, in daemon threads that are reused when their function returns.

Users' functions may never return. They would exhaust a pool of fixed size, and the threads of `concurrent.futures` and
of AnyIO, which are not daemons, would keep the process from exiting. Here a new thread starts whenever none is idle.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from rllm.errors import RLLMError

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]
logger = logging.getLogger(__name__)

BACKEND_THREAD = "rllm trainer"
"""Name of the thread in which a training backend works."""

IDLE_S = 10.0
"""Seconds after which an idle thread ends."""


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run a function in a thread, with the caller's context variables, and return its result.

    Cancelling this call abandons the thread; the `CancelledError` then carries a note with the thread's stack.
    """
    return await _result_of(function, _Worker.take(), name)


class SoftLimiter:
    """Limit on concurrent calls; a call that exceeds a soft timeout continues without counting.

    This way, calls that hang cannot keep all others from starting. Deadlines are up to the caller.
    """

    def __init__(self, limit: int, *, soft_timeout_s: float | None = None) -> None:
        """Allow `limit` calls at a time; without `soft_timeout_s`, each counts until it ends."""
        self._semaphore = asyncio.Semaphore(limit)
        self._soft_timeout_s = soft_timeout_s

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside. `name` identifies the call in the warning if it exceeds the timeout."""
        await self._semaphore.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._semaphore.release()

        def expire() -> None:
            logger.warning("%r has taken %.3g s: another call may now start in addition", name, self._soft_timeout_s)
            release()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._soft_timeout_s, expire) if self._soft_timeout_s is not None else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            release()


class SerialExecutor:
    """Runs functions one after another in one thread, for code that is bound to a thread.

    After a function that was abandoned, or that exceeded the soft timeout, the next one gets a new thread.
    """

    def __init__(self, *, soft_timeout_s: float | None = None) -> None:
        self._limiter = SoftLimiter(1, soft_timeout_s=soft_timeout_s)
        self._worker: _Worker | None = None
        self._closed = False

    async def run(self, function: Callable[[], T], *, name: str, timeout_s: float | None = None) -> T:
        """Run a function when all earlier ones have returned; see `in_thread`.

        Raises:
            TimeoutError: if it does not return within `timeout_s` seconds of its start; its thread is abandoned.
        """
        async with self._limiter.slot(name):
            worker = self._worker or _Worker.start(shared=False)
            self._worker = None
            try:
                async with asyncio.timeout(timeout_s):
                    return await _result_of(function, worker, name)
            finally:
                if worker.is_at(function) or self._worker is not None or self._closed:
                    worker.end()  # when its function returns, if it ever does
                else:
                    self._worker = worker

    def close(self) -> None:
        """Let the thread end, at once or when its function has returned. Idempotent."""
        self._closed = True
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __del__(self) -> None:
        self.close()


class UnboundedExecutor(ThreadPoolExecutor):
    """Default executor for an event loop that users' code shares.

    A call that hangs in `asyncio.to_thread` then delays neither other calls nor the end of the program.
    """

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def settle(outcome: Outcome) -> None:
            result, error = outcome
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        _Worker.take().give(contextvars.copy_context(), partial(fn, *args, **kwargs), settle)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads are daemons and end when idle."""


class EventLoopThread:
    """Event loop in a daemon thread, for objects that belong to one loop but serve others, such as connections."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        # Work begins either before `close`, which cancels it, or not at all; without the lock it could be forgotten.
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._stay()), name=name, daemon=True)
        contextvars.Context().run(self._thread.start)
        self._ready.wait()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work in the thread's loop, cancelled with this call; raise `RLLMError` if the thread is closed first."""
        with self._lock:
            if self._closed:
                raise self._closed_error()
            begun = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if self._closed and here is not None and not here.cancelling():
                raise self._closed_error() from None
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `last`, cancel all other work, and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._end.set_result, last)
        self._thread.join()

    async def _stay(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Callable[[], Coroutine[Any, Any, object]]] = self._loop.create_future()
        self._ready.set()
        last = await self._end
        await last()

    def _closed_error(self) -> RLLMError:
        return RLLMError(f"{self._name!r} was closed before a call had finished")


def run_in_own_loop(work: Awaitable[T]) -> T:
    """Run work to its end in a new event loop, in a thread of its own if the calling thread has a running loop."""

    async def run() -> T:
        return await work

    if asyncio._get_running_loop() is None:
        return asyncio.run(run())
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, run()).result()


async def _result_of(function: Callable[[], T], worker: _Worker, name: str) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, done, outcome)

    worker.thread.name = name
    worker.give(contextvars.copy_context(), function, settle)
    try:
        result, error = await done
    except asyncio.CancelledError as cancelled:
        if worker.is_at(function):
            cancelled.add_note(f"thread {name!r} is abandoned; it was at:\n{stack_of(worker.thread)}")
        raise
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _settle(done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not done.done():
        done.set_result(outcome)


Job = tuple[contextvars.Context, Callable[[], Any], Callable[[Outcome], None]]


class _Worker:
    """Thread that runs one job after another; a shared one returns to the pool and ends when idle."""

    idle: ClassVar[list[_Worker]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, shared: bool) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self._shared = shared
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._function: Callable[[], Any] | None = None

    @classmethod
    def take(cls) -> _Worker:
        with cls.lock:
            worker = cls.idle.pop() if cls.idle else None
        return worker or cls.start(shared=True)

    @classmethod
    def start(cls, *, shared: bool) -> _Worker:
        worker = cls(shared=shared)
        context = contextvars.Context()  # a thread outlives the job that it is started for
        try:
            context.run(_starter().submit, worker._begin)
        except RuntimeError:  # the interpreter is shutting down, and has ended its executors
            context.run(worker.thread.start)
        return worker

    def give(
        self, context: contextvars.Context, function: Callable[[], object], settle: Callable[[Outcome], None]
    ) -> None:
        self._function = function
        self._jobs.put((context, function, settle))

    def _begin(self) -> None:
        if self.thread.ident is not None:  # `start` has started it, because the starter had ended
            return
        try:
            self.thread.start()
        except RuntimeError as error:  # the system allows no more threads
            if (job := self._jobs.get()) is not None:
                job[2]((None, error))

    def is_at(self, function: Callable[[], object]) -> bool:
        return self._function is function

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            context, function, settle = job
            outcome: Outcome
            try:
                outcome = context.run(function), None
            except BaseException as error:  # raised again where the result is awaited
                outcome = None, error
            self._function = None
            if self._shared:
                with self.lock:
                    self.idle.append(self)
            settle(outcome)
            del job, context, function, settle, outcome  # an idle thread must keep nothing alive

    def _next(self) -> Job | None:
        """Wait for the next job; `None` to end."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S if self._shared else None)
            except queue.Empty:
                with self.lock:
                    if self in self.idle:  # otherwise a job is being assigned
                        self.idle.remove(self)
                        return None


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts the others.

    `Thread.start` waits until the new thread runs, which takes longer the more threads are running: an event loop that
    starts a thousand agents would be blocked for seconds.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="rllm thread starter")


def _forget_threads() -> None:
    _starter.cache_clear()
    _Worker.idle.clear()
    _Worker.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked child has no other threads


def stack_of(thread: threading.Thread) -> str:
    """Return the formatted stack of a thread, outermost frame first."""
    if thread.ident is None:
        return "(it has not started)"
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else "(it has ended)"
