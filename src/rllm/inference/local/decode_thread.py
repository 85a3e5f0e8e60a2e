"""The thread on which the embedded engine decodes, and the ways to send it requests and pauses."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from rllm.errors import InferenceError
from rllm.inference.local.scheduler import Request, Scheduler

logger = logging.getLogger(__name__)

_PAUSE_TIMEOUT_S = 120.0


class DecodeThread:
    """Advances a scheduler while it has work. Other threads use it through these methods only."""

    def __init__(self, scheduler: Scheduler, model: PreTrainedModel) -> None:
        """Keep the model in evaluation mode."""
        self._scheduler = scheduler
        self._model = model
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._pauses = 0
        self._parked = False
        self._stopped: str | None = None
        """Reason why no more requests are taken."""
        self._thread = threading.Thread(target=self._run, name="rllm-decode", daemon=True)
        self._thread.start()

    @property
    def num_unseen(self) -> int:
        """Number of requests that have not reached the scheduler yet."""
        return len(self._inbox)

    def submit(self, request: Request) -> None:
        """Queue a request; raise `InferenceError` 503 if the thread was closed or has failed."""
        with self._changed:
            if self._stopped:
                raise InferenceError(self._stopped, status_code=503)
            self._inbox.append(request)
            self._changed.notify_all()

    def release(self, request: Request) -> None:
        """Cancel a request unless it is done."""
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
                    raise InferenceError(f"the decode thread did not pause within {_PAUSE_TIMEOUT_S:.0f} s")
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
        """Wait for work; return False when the engine is closed."""
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
        """Fail all requests as the decode thread ends."""
        with self._changed:
            self._stopped = self._stopped or f"the embedded sampler has failed: {type(cause).__name__}: {cause}"
            self._parked = True
            self._scheduler.submit(self._inbox)
            self._inbox.clear()
            self._changed.notify_all()
        error = InferenceError(self._stopped, status_code=503)
        error.__cause__ = cause
        self._scheduler.fail(error)


class Wakeup:
    """Wakes the event loop that awaits a request from the decode thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def notify(self, request: Request) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # the loop is closed, so the answer is not awaited
            request.cancelled = True

    async def wait(self) -> None:
        """Wait until the request has progressed. Every request ends, at the latest when the decode thread does."""
        await self._event.wait()
        self._event.clear()
