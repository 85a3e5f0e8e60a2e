"""Run a blocking function beside the event loop, in a daemon thread that is used again if it ever comes back.

A pool of fixed size would be exhausted by functions that never return, and its threads keep the process from ending. Here
a new thread is started whenever none is idle.
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
from functools import partial
from typing import Any, ClassVar, TypeVar

from rllm._runtime.forks import forks_end_here
from rllm.errors import RLLMError

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]
logger = logging.getLogger(__name__)

BACKEND_THREAD = "rllm trainer"
"""What the thread is called in which a training backend works."""

IDLE_S = 10.0
"""How long a thread without work waits for some before it ends."""


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """The function's result, or what it raised. It sees the caller's context variables.

    Cancelling this call leaves the thread behind; the `CancelledError` then carries a note with the thread's stack.
    """
    return await _result_of(function, _Worker.take(), name)


class Places:
    """Bounds how many calls are under way at a time; one that takes very long gives its place free, and goes on.

    So calls that hang cannot keep all others from starting. A deadline is for others to set.
    """

    def __init__(self, number: int, *, patience_s: float | None = None) -> None:
        """`patience_s` is how long a call may take before its place is free for another; `None` is for ever."""
        self._free = asyncio.Semaphore(number)
        self._patience_s = patience_s

    @asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[None]:
        """Wait for a place, and have it inside. `name` is what a warning calls whoever lost it."""
        await self._free.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        def lose() -> None:
            logger.warning("%r has taken %.3g s: another call may start beside it", name, self._patience_s)
            give_back()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience_s, lose) if self._patience_s is not None else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            give_back()


class OneThread:
    """Runs functions one after another in one and the same thread, as code that is not thread-safe needs it.

    A function that is abandoned takes its thread with it, as does one that has taken longer than `patience_s` seconds;
    the next one gets a new thread.
    """

    def __init__(self, *, patience_s: float | None = None) -> None:
        self._places = Places(1, patience_s=patience_s)
        self._worker: _Worker | None = None
        self._closed = False

    async def run(self, function: Callable[[], T], *, name: str, timeout_s: float | None = None) -> T:
        """As `in_thread`, when all functions before it have returned.

        Raises:
            TimeoutError: if it has not returned `timeout_s` seconds after its turn came; its thread is left behind.
        """
        async with self._places.one(name):
            worker = self._worker or _Worker.start(shared=False)
            self._worker = None
            try:
                async with asyncio.timeout(timeout_s):
                    return await _result_of(function, worker, name)
            finally:
                if worker.is_at(function) or self._worker is not None or self._closed:
                    worker.end()  # once it is back, if it ever comes back
                else:
                    self._worker = worker

    def close(self) -> None:
        """Let the thread end, at once or when its function has returned. Repeatable."""
        self._closed = True
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __del__(self) -> None:
        self.close()


class Boundless(ThreadPoolExecutor):
    """For `loop.set_default_executor`, where users' code shares the loop: what hangs in `asyncio.to_thread` then keeps no other
    call waiting, nor the end of the program."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
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
        """There is nothing to wait for: its threads end with the program, or before."""


class LoopThread:
    """An event loop in a daemon thread of its own. What belongs to one loop, such as connections, serves those of all others
    from there."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._lock = threading.Lock()
        """What is begun before the end is cancelled by it, and never just forgotten."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._stay()), name=name, daemon=True)
        contextvars.Context().run(self._thread.start)
        self._ready.wait()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the work gives, or raises, in the thread; it is cancelled there if it is here.

        Raises:
            RLLMError: if the thread is closed before it is done.
        """
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
        """Do this last, cancel what is still being done, and end the thread. Repeatable."""
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
        return RLLMError(f"{self._name!r} was closed before a call was over")


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
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(_settle, done, outcome)

    worker.thread.name = name
    worker.give(contextvars.copy_context(), function, settle)
    try:
        result, error = await done
    except asyncio.CancelledError as cancelled:
        if worker.is_at(function):
            cancelled.add_note(f"thread {name!r} is left behind; it was at:\n{stack_of(worker.thread)}")
        raise
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _settle(done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not done.done():
        done.set_result(outcome)


Job = tuple[contextvars.Context, Callable[[], Any], Callable[[Outcome], None]]


class _Worker:
    """A thread that does one job after another. A shared one is used by whoever comes, and ends when nobody does."""

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
        _Starter.of_process().start(worker)
        return worker

    def give(
        self, context: contextvars.Context, function: Callable[[], Any], settle: Callable[[Outcome], None]
    ) -> None:
        self._function = function
        self._jobs.put((context, function, settle))

    def refuse(self, error: Exception) -> None:
        """Answer the first job in the place of a thread that could not be started."""
        if (job := self._jobs.get()) is not None:
            job[2]((None, error))

    def is_at(self, function: Callable[[], Any]) -> bool:
        return self._function is function

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            context, function, settle = job
            outcome: Outcome
            try:
                with forks_end_here():
                    outcome = context.run(function), None
            except BaseException as error:  # whatever it is, it is raised again where the result is awaited
                outcome = None, error
            self._function = None
            if self._shared:
                with self.lock:
                    self.idle.append(self)
            settle(outcome)
            del job, context, function, settle, outcome  # while it waits, it keeps nothing alive

    def _next(self) -> Job | None:
        """The next job; `None` to end."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S if self._shared else None)
            except queue.Empty:
                with self.lock:
                    if self in self.idle:  # otherwise a job is just being given
                        self.idle.remove(self)
                        return None


class _Starter:
    """The thread that starts the others. A start waits until the new thread is at work, and the more are at work already the
    longer that takes: an event loop that began a thousand agents would stand still for seconds."""

    only: ClassVar[_Starter | None] = None

    def __init__(self) -> None:
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, name="rllm thread starter", daemon=True)
        # Threads outlive the jobs that they are started for, so they must inherit nothing of those jobs' context.
        contextvars.Context().run(thread.start)

    @classmethod
    def of_process(cls) -> _Starter:
        with _Worker.lock:
            cls.only = cls.only or cls()
            return cls.only

    def start(self, worker: _Worker) -> None:
        self._workers.put(worker)

    def _work(self) -> None:
        while True:
            worker = self._workers.get()
            try:
                worker.thread.start()
            except RuntimeError as error:  # the system has no room for another
                worker.refuse(error)
            del worker


def _forget_threads() -> None:
    _Starter.only = None
    _Worker.idle.clear()
    _Worker.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked child has none of its parent's threads


def stack_of(thread: threading.Thread) -> str:
    """The lines at which a thread is, outermost first."""
    if thread.ident is None:
        return "(it has not begun)"
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else "(it has ended)"
