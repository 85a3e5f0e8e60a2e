"""Durable traces: a call is acknowledged to its agent only after its traces are in the store."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from rllm.errors import RLLMError
from rllm.gateway.metrics import Metrics
from rllm.gateway.model_call import ModelCall
from rllm.gateway.redaction import Redact, redacted
from rllm.gateway.sessions import Session, check_not_deleted
from rllm.store.base import TraceStore
from rllm.types import Trace

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Pending writes at which no further call begins. The store's own bound is far higher; it blocks the whole event loop."""

_Steps: TypeAlias = Sequence[Callable[[], None]]


class DurableWrites:
    """Converter of the store's futures into awaitables of one event loop.

    A group commit completes many futures at once, in the writer's thread. `asyncio.wrap_future` would wake the loop for each
    of them; here the first one wakes it for all.
    """

    def __init__(self) -> None:
        self._done: deque[tuple[asyncio.Future[None], Future[None]]] = deque()
        self._waking = False
        self.pending = 0
        """Number of writes that calls wait for."""
        self._some_ended = asyncio.Event()

    async def room(self) -> None:
        """Wait until fewer than `MAX_PENDING` writes are pending: a slow disk holds back further calls."""
        while self.pending >= MAX_PENDING:
            self._some_ended.clear()
            await self._some_ended.wait()

    async def wait(self, write: Future[None]) -> None:
        """Wait until a write is durable, or raise its error."""
        if write.done():
            return write.result()
        waiter = asyncio.get_running_loop().create_future()
        self.pending += 1
        write.add_done_callback(lambda done: self._on_done(waiter, done))
        try:
            await waiter
        finally:
            self.pending -= 1
            self._some_ended.set()

    def _on_done(self, waiter: asyncio.Future[None], write: Future[None]) -> None:
        """Runs in the writer's thread."""
        self._done.append((waiter, write))
        if not self._waking:
            self._waking = True
            try:
                waiter.get_loop().call_soon_threadsafe(self._settle)
            except RuntimeError:  # The loop has ended, and with it everything that waits.
                self._waking = False

    def _settle(self) -> None:
        # Before the queue is emptied: anything appended from here on asks for a wake-up of its own.
        self._waking = False
        while self._done:
            waiter, write = self._done.popleft()
            if waiter.done():  # Cancelled: the client left.
                continue
            error = write.exception()
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class TraceWriter:
    """Writer of the traces of calls. Durable traces are counted, and later calls of their session can continue them."""

    def __init__(
        self, store: TraceStore, writes: DurableWrites, metrics: Metrics, *, redact: Redact | None, has_hooks: bool
    ) -> None:
        """`has_hooks`: whether hooks read the traces of finished calls."""
        self._store = store
        self._writes = writes
        self._metrics = metrics
        self._redact = redact
        self._has_hooks = has_hooks

    def write(self, call: ModelCall, traces: Sequence[Trace]) -> Awaitable[None]:
        """Begin to write the traces of a call, and return an awaitable that ends once they are durable.

        Without hooks, nothing here holds the tokens meanwhile: those of all calls that wait for one commit do not fit into
        a processor's cache, and parsing each answer where the last one was takes a tenth less time.

        Raises:
            GatewayError: 410, if the session was deleted. When awaited, also if the redaction hook failed.
        """
        check_not_deleted(call.session)
        write, steps, problem = self._begin(call, traces)
        return self._finish(call, write, steps, problem)

    def write_in_background(self, call: ModelCall, traces: Sequence[Trace]) -> None:
        """Write the traces of a call whose client has gone."""
        if not call.session.deleted:
            write, steps, _ = self._begin(call, traces)
            self._follow(call, write, steps)

    def _begin(self, call: ModelCall, traces: Sequence[Trace]) -> tuple[Future[None], _Steps, RLLMError | None]:
        """Return the write of a call's traces, the steps to take after it, and the error of the redaction hook."""
        stored, problem = (traces, None) if self._redact is None else redacted(traces, self._redact)
        write = self._store.add(stored, session=call.session.ref)
        count = partial(
            self._metrics.count_traces,
            num_traces=len(stored),
            num_failed=sum(trace.error is not None for trace in stored),
            num_prompt_tokens=len(stored[0].prompt_ids),
            num_response_tokens=sum(len(trace.response_ids) for trace in stored),
            first_token_s=stored[0].timings.get("first_token_s"),
        )
        steps: list[Callable[[], None]] = [count]
        if self._has_hooks:
            steps.append(partial(call.traces.extend, stored))
        if problem is None:
            steps += [step for trace in traces for step in call.registrations(trace)]
        return write, steps, problem

    async def _finish(self, call: ModelCall, write: Future[None], steps: _Steps, problem: RLLMError | None) -> None:
        try:
            await self._writes.wait(write)
        except asyncio.CancelledError:  # The client has gone; its traces are stored all the same.
            self._follow(call, write, steps)
            raise
        for step in steps:
            step()
        if problem is not None:
            raise problem

    def _follow(self, call: ModelCall, write: Future[None], steps: _Steps) -> None:
        """Take the steps after a write that no client waits for."""
        write.add_done_callback(_log_failure)
        call.background_write = asyncio.create_task(self._wait_and_take(call.session, write, steps))

    async def _wait_and_take(self, session: Session, write: Future[None], steps: _Steps) -> None:
        """Hold the session meanwhile, so that nothing reads it from the store without this call."""
        with suppress(RLLMError):  # Already logged.
            await self._writes.wait(write)
            for step in steps:
                step()


def _log_failure(write: Future[None]) -> None:
    if not write.cancelled() and (error := write.exception()):
        logger.error("the trace of a call whose client has left was not stored: %s", error)
