"""Answer a call and keep its trace: nothing is acknowledged to the agent before its trace is durable."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from rllm.capture import ChatStream, Prior, Said, traces_from_chat
from rllm.errors import RLLMError, TokenMismatchError
from rllm.gateway.dialects.base import StreamEncoder
from rllm.gateway.durable import DurableWrites
from rllm.gateway.errors import STOPPED, UpstreamError, was_stopped
from rllm.gateway.metrics import Metrics
from rllm.gateway.redaction import Redact, redacted
from rllm.gateway.sessions import Session, check_not_deleted, with_fixed_sampling
from rllm.gateway.standard import ChunkCompleter, complete_response
from rllm.gateway.upstream.base import FACTS_KEY, Upstream, UpstreamCall
from rllm.gateway.upstream.route import Route
from rllm.store.base import TraceStore
from rllm.types import DRIFT_KEY, Trace

logger = logging.getLogger(__name__)

_random = random.Random()
"""Seeded by the system once; asking it for every id would cost a system call, which gives up the interpreter's lock."""

ABORTED = "the client disconnected before the answer was complete"

_NOT_COUNTED = ("stream", "stream_options", "n", "min_tokens")
"""What a request may ask for that one token, whole, is no answer to."""


def new_call_id(prefix: str) -> str:
    """A new id, in the form that answers of one wire format have."""
    return f"{prefix}{_random.getrandbits(128):032x}"


@dataclass(kw_only=True, slots=True, eq=False)
class ModelCall:
    """One model call as a chat request, whatever wire format it came in."""

    asked: Mapping[str, Any]
    """The agent's own request, as a chat request."""
    session: Session
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Its own W3C headers, which go to the upstream as they came."""
    id: str
    """The id of the answer and of its trace. Ours, so that no two upstreams can ever give the same."""
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    route: Route = field(init=False)
    said: Said | None = field(init=False, default=None)
    """What is compared with the session's earlier calls, if it may have any."""
    traces: list[Trace] = field(init=False, default_factory=list)
    """What came of it, once that is durable."""
    left: asyncio.Task[None] | None = field(init=False, default=None)
    """For a call whose client has left: ends when what came of it is durable, or cannot be."""

    def __post_init__(self) -> None:
        # A session that is not kept has this call only.
        self.route = Route(None if self.session.lineage is None else self.session.id)
        if self.session.conversations is not None:
            self.said = Said.of(self.asked["messages"], self.asked.get("tools"))

    def prior(self) -> Prior | None:
        """The earlier call of the session that the messages go on from."""
        if self.said is None or self.session.conversations is None:
            return None
        return self.session.conversations.prior_of(self.said)

    def lacks(self) -> str | None:
        """The earlier trace whose tokens must be supplied to tell."""
        if self.said is None or self.session.conversations is None or not self.said.goes_on:
            return None
        return self.session.conversations.lacks(self.said)

    def supply(self, trace: Trace | None) -> None:
        """The trace that was missing."""
        if self.said is not None and self.session.conversations is not None:
            self.session.conversations.supply(self.said, trace)

    def drift(self, prompt_ids: Any) -> dict[str, Any]:
        """As metadata, why the prompt does not go on from the tokens of the answer that it follows; empty if it does."""
        if self.said is None or self.session.conversations is None or not isinstance(prompt_ids, list):
            return {}
        drift = self.session.conversations.drift_of(self.said, prompt_ids)
        return {} if drift is None else {DRIFT_KEY: drift}

    def keeping(self, trace: Trace) -> Iterator[Callable[[], None]]:
        """What, once it is called, lets later calls of the session find this one; it has no hold of the trace."""
        if self.session.lineage is not None:
            yield self.session.lineage.adding(trace)
        if self.said is not None and self.session.conversations is not None and trace.error is None:
            yield self.session.conversations.adding(self.said, trace)


class Gateway:
    """The gateway without HTTP: calls in, answers out, traces kept. Lives in one event loop."""

    def __init__(
        self,
        store: TraceStore,
        upstream: Upstream,
        *,
        require_tokens: bool = False,
        exact_turns: bool = True,
        redact: Redact | None = None,
        observed: bool = True,
    ) -> None:
        """`observed`: whether anybody asks calls for their traces once they are over."""
        self.store = store
        self.upstream = upstream
        self.metrics = Metrics()
        self.writes = DurableWrites()
        self._require_tokens = require_tokens
        self._exact_turns = exact_turns
        self._redact = redact
        self._observed = observed

    async def complete(self, call: ModelCall, render: Callable[[dict[str, Any]], bytes]) -> bytes:
        """The whole answer, rendered, once its traces are durable.

        Raises:
            RLLMError: if there is none; the failure is in the store by then.
        """
        sent = self._prepared(call)
        try:
            response = await self.upstream.complete(await self._upstream_call(call, sent))
            response["id"] = call.id
            complete_response(response, sent.get("model") or "")
            traces = self._traces(call, sent, response)
            answer = render(response)
        except asyncio.CancelledError as cut:
            self._keep_unawaited(call, self._failed(call, sent, _why_cut(cut)))
            raise
        except Exception as error:
            await self._keep(call, self._failed(call, sent, _reason(error)))
            raise
        kept = self._keep(call, traces)
        del response, traces
        await kept
        return answer

    async def stream(self, call: ModelCall, encoder: StreamEncoder) -> AsyncGenerator[bytes, None]:
        """The answer piece by piece; the piece that ends it comes once its traces are durable.

        Closing the generator early, or cancelling it, cancels the generation and keeps what had been sampled.

        Raises:
            RLLMError: if the answer breaks off; what there was of it is in the store by then.
        """
        sent = self._prepared(call)
        rebuilt = ChatStream()
        completer = ChunkCompleter(sent.get("model") or "")
        timings: dict[str, float] = {}
        try:
            async with aclosing(self.upstream.stream(await self._upstream_call(call, sent))) as batches:
                async for chunks in batches:
                    timings.setdefault("first_token_s", time.perf_counter() - call.clock)
                    for chunk in chunks:
                        chunk["id"] = call.id
                        completer.complete(chunk)
                        rebuilt.feed(chunk)
                    if piece := encoder.feed(chunks):
                        yield piece
            if not rebuilt.finished:
                raise UpstreamError("the upstream's stream ended before the answer was complete")
            traces = self._traces(call, sent, rebuilt.response(), timings)
        except (asyncio.CancelledError, GeneratorExit) as cut:
            self._keep_unawaited(call, self._failed(call, sent, _why_cut(cut), rebuilt.response(), timings))
            raise
        except Exception as error:
            await self._keep(call, self._failed(call, sent, _reason(error), rebuilt.response(), timings))
            raise
        kept = self._keep(call, traces)
        del rebuilt, traces
        await kept
        yield encoder.finish()

    async def count_tokens(self, call: ModelCall) -> int:
        """How many tokens the prompt of a call has; to find out, the upstream samples one token, which is not kept.

        Raises:
            RLLMError: if the upstream does not say.
        """
        imposed = with_fixed_sampling(call.asked, call.session.sampling)
        asked = {name: value for name, value in imposed.items() if name not in _NOT_COUNTED}
        sent = self.upstream.prepare({**asked, "max_tokens": 1, "max_completion_tokens": None})
        response = await self.upstream.complete(UpstreamCall(id=call.id, request=sent, route=call.route))
        counted = (response.get("usage") or {}).get("prompt_tokens", response.get("prompt_token_ids"))
        if counted is None:
            raise UpstreamError("the upstream's answer has neither usage.prompt_tokens nor prompt_token_ids")
        return len(counted) if isinstance(counted, list) else int(counted)

    def _prepared(self, call: ModelCall) -> dict[str, Any]:
        """The request that is really sent: the session's sampling parameters win over the agent's. Counts the call."""
        return self.upstream.prepare(call.session.imposed_on(call.asked))

    async def _upstream_call(self, call: ModelCall, sent: dict[str, Any]) -> UpstreamCall:
        """The call as it is put to the upstream."""
        return UpstreamCall(
            id=call.id,
            request=sent,
            prompt_ids=await self._continued(call, sent),
            logprob_details=bool(call.asked.get("logprobs")),
            headers=call.trace_context or call.session.trace_context,
            route=call.route,
        )

    async def _continued(self, call: ModelCall, sent: Mapping[str, Any]) -> list[int] | None:
        """The prompt behind exactly the tokens of the answer that the call goes on from, if there is one."""
        while missing := call.lacks():
            call.supply(await asyncio.to_thread(self.store.trace, call.session.id, missing))
        prior = call.prior() if self._exact_turns else None
        return None if prior is None else self.upstream.continued_prompt(sent, prior)

    def _traces(
        self,
        call: ModelCall,
        sent: Mapping[str, Any],
        response: Mapping[str, Any],
        timings: Mapping[str, float] = MappingProxyType({}),
        *,
        complete: bool = True,
    ) -> list[Trace]:
        facts = response.get(FACTS_KEY) or {}
        if complete and not response.get("choices"):
            raise UpstreamError(f"the upstream's answer has choices={response.get('choices')!r}: it holds no answer")
        return traces_from_chat(
            {**sent, **(facts.get("sampling") or {})},
            response,
            session_id=call.session.id,
            started_at=call.started_at,
            timings={**timings, **call.route.timings(), "total_s": time.perf_counter() - call.clock},
            metadata={**call.metadata, **call.route.notes(), **call.drift(response.get("prompt_token_ids"))},
            weight_version=facts.get("weight_version", call.route.weight_version),
            weight_updates=facts.get("weight_updates") or (),
            template_hash=facts.get("template_hash"),
            requested_sampling=call.asked,
            logprobs_kind=facts.get("logprobs_kind", "unknown"),
            require_tokens=complete and self._require_tokens,
            parent_id=self._parent_of(call, response),
        )

    def _parent_of(self, call: ModelCall, response: Mapping[str, Any]) -> str | None:
        prompt_ids = response.get("prompt_token_ids")
        if call.session.lineage is None or not isinstance(prompt_ids, list):
            return None
        return call.session.lineage.parent_of(prompt_ids)

    def _failed(
        self,
        call: ModelCall,
        sent: Mapping[str, Any],
        reason: str,
        partial: Mapping[str, Any] = MappingProxyType({}),
        timings: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Trace]:
        """The record of a call without a whole answer: its tokens so far, or none, and why."""
        finish_reason = "abort" if reason in (ABORTED, STOPPED) else "error"
        traces: list[Trace] = []
        if partial.get("choices"):
            # The tokens that arrived may be the very reason for the failure.
            with suppress(TokenMismatchError):
                traces = self._traces(call, sent, {**partial, "id": call.id}, timings, complete=False)
        if not traces:
            nothing = {"id": call.id, "choices": []}
            traces = self._traces(call, sent, nothing, timings, complete=False)
        return [replace(trace, error=reason, finish_reason=finish_reason) for trace in traces]

    def _keep(self, call: ModelCall, traces: list[Trace]) -> Awaitable[None]:
        """Begin to write traces; what is returned ends once they are durable.

        Nothing here holds their tokens meanwhile: those of all the calls that wait for one commit do not fit into a processor's
        cache, and to parse each answer where the last one was takes a tenth less.
        """
        check_not_deleted(call.session)
        stored, problem = (traces, None) if self._redact is None else redacted(traces, self._redact)
        write = self.store.add(stored, session=call.session.ref)
        steps = [self._counting(call, stored)]
        if problem is None:
            steps += [step for trace in traces for step in call.keeping(trace)]
        return self._kept(call, write, steps, problem)

    async def _kept(
        self, call: ModelCall, write: Future[None], steps: Sequence[Callable[[], None]], problem: RLLMError | None
    ) -> None:
        try:
            await self.writes.wait(write)
        except asyncio.CancelledError:  # The client has left, and what came of its call is kept all the same.
            self._leave(call, write, steps)
            raise
        for step in steps:
            step()
        if problem is not None:
            raise problem

    def _keep_unawaited(self, call: ModelCall, traces: list[Trace]) -> None:
        """Store the trace of a call that nobody waits for any more."""
        if call.session.deleted:
            return
        if self._redact is not None:
            traces, _ = redacted(traces, self._redact)
        self._leave(call, self.store.add(traces, session=call.session.ref), [self._counting(call, traces)])

    def _leave(self, call: ModelCall, write: Future[None], steps: Sequence[Callable[[], None]]) -> None:
        """Have these steps follow a write that nobody waits for any more."""
        write.add_done_callback(_log_failure)
        call.left = asyncio.create_task(self._followed(write, steps))

    async def _followed(self, write: Future[None], steps: Sequence[Callable[[], None]]) -> None:
        with suppress(RLLMError):  # it is logged
            await self.writes.wait(write)
            for step in steps:
                step()

    def _counting(self, call: ModelCall, traces: list[Trace]) -> Callable[[], None]:
        """What counts traces that are durable, once it is called; it has a hold of them only where calls are observed."""
        count = partial(
            self.metrics.count_traces,
            num_traces=len(traces),
            num_failed=sum(trace.error is not None for trace in traces),
            num_prompt_tokens=len(traces[0].prompt_ids),
            num_response_tokens=sum(len(trace.response_ids) for trace in traces),
            first_token_s=traces[0].timings.get("first_token_s"),
        )
        if not self._observed:
            return count

        def count_and_show() -> None:
            call.traces.extend(traces)
            count()

        return count_and_show


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RLLMError) else f"{type(error).__name__}: {error}"


def _why_cut(cut: BaseException) -> str:
    return STOPPED if was_stopped(cut) else ABORTED


def _log_failure(write: Future[None]) -> None:
    if not write.cancelled() and (error := write.exception()):
        logger.error("the trace of a call whose client has left was not stored: %s", error)
