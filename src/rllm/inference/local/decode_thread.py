"""The thread on which the embedded engine decodes, and how requests and pauses reach it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rllm.errors import InferenceError
from rllm.inference.local.scheduler import Request, Scheduler
from rllm.parser.answer import AnswerReader

logger = logging.getLogger(__name__)

_CHECK_S = 10.0
"""How often a waiting request makes sure that the decode thread is alive."""
_PAUSE_TIMEOUT_S = 120.0


class DecodeThread:
    """Advances a scheduler while it has work. All other threads speak to it through the methods here."""

    def __init__(self, scheduler: Scheduler, model: Any) -> None:
        """The model is kept in evaluation mode."""
        self._scheduler = scheduler
        self._model = model
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._pauses = 0
        self._parked = False
        self._stopped: str | None = None
        """Why no more requests are taken."""
        self._thread = threading.Thread(target=self._run, name="rllm-decode", daemon=True)
        self._thread.start()

    @property
    def num_unseen(self) -> int:
        """Requests that the scheduler has not been given yet."""
        return len(self._inbox)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Have a request answered.

        Raises:
            InferenceError: 503, if the thread was closed or has failed.
        """
        with self._changed:
            if self._stopped:
                raise InferenceError(self._stopped, status_code=503)
            self._inbox.append(request)
            self._changed.notify_all()

    def release(self, request: Request) -> None:
        """Give up a request that nobody waits for any more."""
        if not request.done:
            request.cancelled = True
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the thread between two steps; may be nested."""
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._parked, timeout=_PAUSE_TIMEOUT_S):
                    raise InferenceError(f"the decode thread did not come to rest within {_PAUSE_TIMEOUT_S:.0f} s")
            except BaseException:
                self._pauses -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; requests in flight fail. Closing twice is allowed."""
        with self._changed:
            self._stopped = self._stopped or "the engine is closed"
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_PAUSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._model.training:
                    self._model.eval()
                with torch.no_grad():
                    self._scheduler.advance()
            self._stop(InferenceError("the engine was closed", status_code=503))
        except BaseException as error:
            logger.exception("the embedded sampler has failed")
            self._stop(error)

    def _wait_for_work(self) -> bool:
        """Rest until there is something to do; False when the engine is closed."""
        with self._changed:
            while not self._stopped:
                if not self._pauses:
                    self._scheduler.submit(self._inbox)
                    self._inbox.clear()
                    if self._scheduler.has_work:
                        self._parked = False
                        return True
                self._parked = True
                self._changed.notify_all()
                self._changed.wait()
            return False

    def _stop(self, cause: BaseException) -> None:
        """The last act of the decode thread: nobody may wait for it any longer."""
        with self._changed:
            self._stopped = self._stopped or f"the embedded sampler has failed: {type(cause).__name__}: {cause}"
            self._parked = True
            self._scheduler.submit(self._inbox)
            self._inbox.clear()
            self._changed.notify_all()
        error = InferenceError(self._stopped, status_code=503)
        error.__cause__ = cause
        self._scheduler.fail(error)


class News:
    """Carries word of a request from the decode thread to the event loop that awaits it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._pending = False

    def announce(self, request: Request) -> None:
        if not self._pending:
            self._pending = True
            try:
                self._loop.call_soon_threadsafe(self._arrive)
            except RuntimeError:  # the loop is closed: nobody awaits the answer
                request.cancelled = True

    def _arrive(self) -> None:
        self._pending = False
        self._event.set()

    async def wait(self) -> bool:
        """Whether there is news; False after a while without."""
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class Call:
    """A request, seen from the coroutine that made it."""

    def __init__(self, request: Request, reader: AnswerReader, news: News, thread: DecodeThread) -> None:
        self.request = request
        self.reader = reader
        self._news = news
        self._thread = thread

    async def news(self) -> None:
        """Wait until the request has got further.

        Raises:
            InferenceError: if the decode thread is gone, which only a dying interpreter can bring about.
        """
        while not await self._news.wait():
            if not self._thread.is_alive() and not self.request.done:
                raise InferenceError("the decode thread is gone", status_code=503)

    async def finished(self) -> None:
        while not self.request.done:
            await self.news()
