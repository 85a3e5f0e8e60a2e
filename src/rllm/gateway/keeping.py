"""Make what came of calls durable: nothing is acknowledged to the agent before that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from rllm.capture.tokens import with_lists
from rllm.errors import RLLMError
from rllm.gateway.durable import DurableWrites
from rllm.gateway.metrics import Metrics
from rllm.gateway.model_call import ModelCall
from rllm.gateway.redaction import Redact, redacted
from rllm.gateway.sessions import Session, check_not_deleted
from rllm.store.base import TraceStore
from rllm.types import Trace

logger = logging.getLogger(__name__)

_Steps: TypeAlias = Sequence[Callable[[], None]]


class TraceKeeper:
    """Writes the traces of calls; once they are durable, they are counted, and later calls of their session find them."""

    def __init__(
        self, store: TraceStore, writes: DurableWrites, metrics: Metrics, *, redact: Redact | None, observed: bool
    ) -> None:
        """`observed`: whether anybody asks calls for their traces once they are over."""
        self._store = store
        self._writes = writes
        self._metrics = metrics
        self._redact = redact
        self._observed = observed
        self._takes_arrays = not observed and redact is None and getattr(store, "takes_arrays", False)
        """Whether nobody but us and the store ever sees a trace on its way."""

    def keep(self, call: ModelCall, traces: Sequence[Trace]) -> Awaitable[None]:
        """Begin to write the traces of a call; what is returned ends once they are durable.

        Unless calls are observed, nothing here holds their tokens meanwhile: those of all the calls that wait for one commit do
        not fit into a processor's cache, and to parse each answer where the last one was takes a tenth less.

        Raises:
            GatewayError: 410, if the session was deleted. Awaited, also if the redaction hook failed.
        """
        check_not_deleted(call.session)
        write, steps, problem = self._begin(call, traces)
        return self._kept(call, write, steps, problem)

    def keep_unawaited(self, call: ModelCall, traces: Sequence[Trace]) -> None:
        """Keep the traces of a call that nobody waits for any more."""
        if not call.session.deleted:
            write, steps, _ = self._begin(call, traces)
            self._follow(call, write, steps)

    def _begin(self, call: ModelCall, traces: Sequence[Trace]) -> tuple[Future[None], _Steps, RLLMError | None]:
        """The write of a call's traces, the steps that are to follow it, and what went wrong before it."""
        if not self._takes_arrays:
            traces = [with_lists(trace) for trace in traces]
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
        if self._observed:
            steps.append(partial(call.traces.extend, stored))
        if problem is None:
            steps += [step for trace in traces for step in call.keeping(trace)]
        return write, steps, problem

    async def _kept(self, call: ModelCall, write: Future[None], steps: _Steps, problem: RLLMError | None) -> None:
        try:
            await self._writes.wait(write)
        except asyncio.CancelledError:  # The client has left, and what came of its call is kept all the same.
            self._follow(call, write, steps)
            raise
        for step in steps:
            step()
        if problem is not None:
            raise problem

    def _follow(self, call: ModelCall, write: Future[None], steps: _Steps) -> None:
        """Have these steps follow a write that nobody waits for any more."""
        write.add_done_callback(_log_failure)
        call.left = asyncio.create_task(self._followed(call.session, write, steps))

    async def _followed(self, session: Session, write: Future[None], steps: _Steps) -> None:
        """Holds the session meanwhile, so that nobody reads it from the store without this call."""
        with suppress(RLLMError):  # it is logged
            await self._writes.wait(write)
            for step in steps:
                step()


def _log_failure(write: Future[None]) -> None:
    if not write.cancelled() and (error := write.exception()):
        logger.error("the trace of a call whose client has left was not stored: %s", error)
