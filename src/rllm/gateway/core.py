"""The gateway without HTTP: it answers calls, each only after its traces are durable in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from rllm.capture import CallNode, ChatStream, MessageDigests, packed_ids, traces_from_chat
from rllm.config.sampling import with_fixed_sampling
from rllm.errors import PromptTooLongError, RLLMError, TokenMismatchError
from rllm.gateway.dialects.base import StreamEncoder
from rllm.gateway.dialects.chat import ChunkNormalizer, fill_missing_fields
from rllm.gateway.errors import STOPPED, UpstreamError, was_stopped
from rllm.gateway.metrics import Metrics
from rllm.gateway.sessions import SessionState, check_not_deleted
from rllm.gateway.upstream.base import FACTS_KEY, Route, Upstream, UpstreamCall
from rllm.parser.chat_template import is_long
from rllm.store.base import TraceStore
from rllm.store.codec import any_to_json
from rllm.types import DRIFT_KEY, LOST_KEY, JSONMapping, JSONObject, Trace

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Pending writes at which no further call begins. The store's own bound is far higher, and blocks the event loop."""

ABORTED = "the client disconnected before the answer was complete"

_NOT_COUNTED = ("stream", "stream_options", "n", "min_tokens")
"""Request fields dropped when sampling one token to count the prompt."""


@dataclass(kw_only=True, slots=True, eq=False)
class ModelCall:
    """One model call as a chat request, converted from any wire format."""

    asked: JSONMapping
    """The agent's own request, as a chat request."""
    prompt_ids: Sequence[int] | None = None
    """Token ids of the prompt, if known before sampling: sent by the agent, or continuing an earlier answer."""
    session: SessionState
    metadata: JSONMapping = field(default_factory=dict)
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C trace headers of the request, which are sent to the upstream unchanged."""
    id: str
    """Id of the answer and of its trace. It is ours, so that no two upstreams can give the same one."""
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    route: Route = field(init=False)
    digests: MessageDigests = field(init=False)
    """Digests of the messages, to compare with the session's earlier calls."""
    lost: tuple[str, ...] = field(init=False, default=())
    """Kinds of content that the upstream's chat template leaves out of the prompt, such as `tools`."""
    traces: list[Trace] = field(init=False, default_factory=list)
    """Its traces, once they are durable, if spans are exported."""
    on_durable: Callable[[ModelCall], None] = field(init=False, default=lambda call: None)
    """Called once its traces are durable."""

    def __post_init__(self) -> None:
        session, messages = self.session, self.asked["messages"]
        self.route = Route(None if session.is_single else session.id, seed=session.sampling.parameters.get("seed"))
        self.digests = MessageDigests.of(
            messages, self.asked.get("tools"), session.conversations, any_to_json(messages)
        )

    def drift_metadata(self, prompt_ids: array[int]) -> JSONObject:
        """Return as metadata why the prompt does not continue the tokens of the answer before it; empty if it does."""
        drift = self.session.conversations.drift_of(self.digests, prompt_ids)
        return {} if drift is None else {DRIFT_KEY: drift}


class Gateway:
    """Answers calls through an upstream, and stores their traces. Belongs to one event loop."""

    def __init__(
        self,
        store: TraceStore,
        upstream: Upstream,
        *,
        require_tokens: bool = False,
        exact_turns: bool = True,
        keeps_traces: bool = False,
    ) -> None:
        """Set `keeps_traces` if finished calls are to keep their traces, for spans."""
        self.store = store
        self.upstream = upstream
        self.metrics = Metrics(upstream)
        self.writes = DurableWrites()
        self._require_tokens = require_tokens
        self._exact_turns = exact_turns
        self._keeps_traces = keeps_traces

    async def complete(self, call: ModelCall, render: Callable[[JSONObject], bytes]) -> bytes:
        """Return the whole answer, rendered, once its traces are durable.

        Raises:
            RLLMError: if there is none; the failure is in the store by then.
        """
        sent = await self._prepared(call)
        try:
            response = await self.upstream.complete(await self._upstream_call(call, sent))
            response["id"] = call.id
            fill_missing_fields(response, sent.get("model") or "")
            traces = self._traces(call, sent, response)
            answer = render(response)
        except asyncio.CancelledError as cut:
            self.write_in_background(call, self._failed(call, sent, _why_cut(cut)))
            raise
        except Exception as error:
            await self.write(call, self._failed(call, sent, _reason(error)))
            raise
        written = self.write(call, traces)
        del response, traces
        await written
        return answer

    async def stream(self, call: ModelCall, encoder: StreamEncoder) -> AsyncGenerator[bytes, None]:
        """Yield the answer piece by piece; the last piece comes once its traces are durable.

        Closing the generator early, or cancelling it, cancels the generation and stores the tokens sampled so far.

        Raises:
            RLLMError: if the answer breaks off; its tokens so far are in the store by then.
        """
        sent = await self._prepared(call)
        rebuilt = ChatStream()
        normalizer = ChunkNormalizer(sent.get("model") or "")
        timings: dict[str, float] = {}
        try:
            async with aclosing(self.upstream.stream(await self._upstream_call(call, sent))) as batches:
                async for chunks in batches:
                    timings.setdefault("first_token_s", time.perf_counter() - call.clock)
                    for chunk in chunks:
                        chunk["id"] = call.id
                        normalizer.fill_missing_fields(chunk)
                        rebuilt.feed(chunk)
                    if piece := encoder.feed(chunks):
                        yield piece
            if not rebuilt.finished:
                raise UpstreamError("the upstream's stream ended before the answer was complete")
            response = rebuilt.response()
            fill_missing_fields(response, sent.get("model") or "")
            traces = self._traces(call, sent, response, timings)
            ending = encoder.finish(response)
        except (asyncio.CancelledError, GeneratorExit) as cut:
            failed = self._failed(call, sent, _why_cut(cut), rebuilt.response(), timings)
            self.write_in_background(call, failed)
            raise
        except Exception as error:
            failed = self._failed(call, sent, _reason(error), rebuilt.response(), timings)
            await self.write(call, failed)
            raise
        written = self.write(call, traces)
        del rebuilt, response, traces
        await written
        yield ending

    async def refuse(self, call: ModelCall, error: Exception) -> None:
        """Store a failed trace for a request rejected before it reached the upstream.

        Storage errors are logged, never raised: the agent must still receive the original error.
        """
        request = {name: call.asked.get(name) for name in ("model", "messages", "tools")}
        try:
            await self.write(call, self._failed(call, request, _reason(error)))
        except RLLMError as failure:
            # Not the reason itself: it may repeat text of the agent.
            logger.error("a call was rejected, and its trace could not be stored: %s", failure)

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of tokens of a call's prompt. The upstream samples one token for it, which is not stored.

        Raises:
            RLLMError: if the upstream does not report it.
        """
        imposed = with_fixed_sampling(call.asked, call.session.sampling.parameters)
        asked = {name: value for name, value in imposed.items() if name not in _NOT_COUNTED}
        sent = self.upstream.prepare({**asked, "max_tokens": 1, "max_completion_tokens": None})
        try:
            response = await self.upstream.complete(UpstreamCall(id=call.id, request=sent, route=call.route))
        except PromptTooLongError as error:
            if error.num_tokens is None:
                raise
            return error.num_tokens  # The client may want to know how much to leave out.
        counted = (response.get("usage") or {}).get("prompt_tokens", response.get("prompt_token_ids"))
        if counted is None:
            raise UpstreamError("the upstream's answer has neither usage.prompt_tokens nor prompt_token_ids")
        return len(counted) if isinstance(counted, list) else int(counted)

    async def _prepared(self, call: ModelCall) -> JSONObject:
        """Return the request that is really sent, with the session's sampling parameters. Counts the call.

        Raises:
            RLLMError: if the upstream cannot serve it; the failure is in the store by then.
        """
        await self.writes.room()
        try:
            messages, tools = call.asked["messages"], call.asked.get("tools")
            sent = self.upstream.prepare(call.session.sampling.impose(call.asked, messages, tools, call.prompt_ids))
            call.lost = self.upstream.lost(sent["messages"], sent.get("tools"))
        except Exception as error:
            await self.refuse(call, error)
            raise
        return sent

    async def _upstream_call(self, call: ModelCall, sent: JSONObject) -> UpstreamCall:
        """Return the call as the upstream gets it."""
        if call.prompt_ids is None:
            call.prompt_ids = await self._continued(call, sent)
        return UpstreamCall(
            id=call.id,
            request=sent,
            prompt_ids=call.prompt_ids,
            logprob_details=bool(call.asked.get("logprobs")),
            headers=call.trace_context or call.session.trace_context,
            route=call.route,
        )

    async def _continued(self, call: ModelCall, sent: JSONMapping) -> Sequence[int] | None:
        """Return the prompt that continues exactly the tokens of an earlier answer, if there is one."""
        conversations, digests = call.session.conversations, call.digests
        if not digests.has_answer:
            return None
        while missing := conversations.missing_trace(digests):
            trace = await asyncio.to_thread(self.store.trace, call.session.id, missing)
            conversations.provide_tokens(digests, trace)
        prior = conversations.prior_answer(digests) if self._exact_turns else None
        if prior is None:
            return None
        make = partial(self.upstream.continued_prompt, sent, prior)
        return await asyncio.to_thread(make) if is_long(sent["messages"][prior.num_messages :]) else make()

    def _traces(
        self,
        call: ModelCall,
        sent: JSONMapping,
        response: JSONMapping,
        timings: Mapping[str, float] = MappingProxyType({}),
        *,
        complete: bool = True,
    ) -> list[Trace]:
        facts = response.get(FACTS_KEY) or {}
        version = facts.get("weight_version")
        prompt_ids = packed_ids(response.get("prompt_token_ids"))
        if prompt_ids is not None:  # A list of all ids of a long conversation takes milliseconds to make and to free.
            response = {**response, "prompt_token_ids": prompt_ids}
        if complete and not response.get("choices"):
            raise UpstreamError(f"the upstream's answer has choices={response.get('choices')!r}: it holds no answer")
        return traces_from_chat(
            {**sent, **(facts.get("sampling") or {})},
            response,
            session_id=call.session.id,
            started_at=call.started_at,
            timings={**timings, **call.route.timings(), "total_s": time.perf_counter() - call.clock},
            metadata={
                **call.metadata,
                **call.route.notes(),
                **({} if prompt_ids is None else call.drift_metadata(prompt_ids)),
                **({LOST_KEY: list(call.lost)} if call.lost else {}),
            },
            weight_version=call.route.weight_version if version is None else version,
            weight_updates=facts.get("weight_updates") or (),
            template_hash=facts.get("template_hash"),
            requested_sampling=call.asked,
            logprobs_kind=facts.get("logprobs_kind", "unknown"),
            require_tokens=complete and self._require_tokens,
            parent_id=None if prompt_ids is None else call.session.conversations.parents.parent_of(prompt_ids),
        )

    def _failed(
        self,
        call: ModelCall,
        sent: JSONMapping,
        reason: str,
        partial: JSONMapping = MappingProxyType({}),
        timings: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Trace]:
        """Return the traces of a call without a whole answer: its tokens so far, if any, and the reason."""
        known = {} if call.prompt_ids is None else {"prompt_token_ids": call.prompt_ids}
        finish_reason = "abort" if reason in (ABORTED, STOPPED) else "error"
        traces: list[Trace] = []
        if partial.get("choices"):
            # The tokens that arrived may be the very reason for the failure.
            with suppress(TokenMismatchError):
                traces = self._traces(call, sent, {**known, **partial, "id": call.id}, timings, complete=False)
        if not traces:
            nothing = {**known, "id": call.id, "choices": []}
            traces = self._traces(call, sent, nothing, timings, complete=False)
        return [replace(trace, error=reason, finish_reason=finish_reason) for trace in traces]

    def write(self, call: ModelCall, traces: Sequence[Trace]) -> asyncio.Future[None]:
        """Begin to write the traces of a call, and return a future that ends once they are durable.

        Until then the session stays in memory, so that nothing reads it from the store without this call. Unless spans
        need the tokens, nothing here refers to them: the tokens of all calls that wait for one commit exceed a
        processor's cache, and parsing each answer into the memory of the last one takes a tenth less time.

        Raises:
            GatewayError: 410, if the session was deleted.
        """
        check_not_deleted(call.session)
        write = self.store.add(traces, session=call.session.ref)
        count = partial(
            self.metrics.count_traces,
            num_traces=len(traces),
            num_failed=sum(trace.error is not None for trace in traces),
            num_prompt_tokens=len(traces[0].prompt_ids),
            num_response_tokens=sum(len(trace.response_ids) for trace in traces),
            first_token_s=traces[0].timings.get("first_token_s"),
        )
        kept = traces if self._keeps_traces else ()
        known = call.session.conversations
        # What lets later calls of the session continue this one, without references to the traces.
        to_remember = [(CallNode.of_trace(trace), known.prepare(call.digests, trace)) for trace in traces]

        def after() -> None:
            count()
            for node, answer in to_remember:
                known.parents.add(node)
                known.add(answer)
            call.traces.extend(kept)
            call.on_durable(call)

        return self.writes.wait(write, after)

    def write_in_background(self, call: ModelCall, traces: Sequence[Trace]) -> None:
        """Write the traces of a call whose client has gone."""
        if not call.session.deleted:
            self.write(call, traces).cancel()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RLLMError) else f"{type(error).__name__}: {error}"


def _why_cut(cut: BaseException) -> str:
    return STOPPED if was_stopped(cut) else ABORTED


# --- durable traces ---------------------------------------------------------------------------------------------------


class DurableWrites:
    """Waits in one event loop for the store's writes, which complete in another thread."""

    def __init__(self) -> None:
        self.pending = 0
        """Number of writes that are not durable yet."""
        self._some_ended = asyncio.Event()

    async def room(self) -> None:
        """Wait until fewer than `MAX_PENDING` writes are pending: a slow disk holds back further calls."""
        while self.pending >= MAX_PENDING:
            self._some_ended.clear()
            await self._some_ended.wait()

    def wait(self, write: Future[None], after: Callable[[], None] = lambda: None) -> asyncio.Future[None]:
        """Return a future that completes with the write. Cancelling it only stops the waiting.

        Args:
            write: the store's future.
            after: called once the write is durable, even if the returned future was cancelled.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self.pending += 1

        def end(write: Future[None]) -> None:  # a closure over the write would be a cycle
            self.pending -= 1
            self._some_ended.set()
            error = write.exception()
            if not waiter.cancelled():
                waiter.set_result(None) if error is None else waiter.set_exception(error)
            elif error is not None:
                logger.error("the trace of a call whose client has left was not stored: %s", error)
            if error is None:
                after()  # before the waiter's task runs again

        def wake(write: Future[None]) -> None:
            with suppress(RuntimeError):  # The loop has ended, and with it everything that waits.
                loop.call_soon_threadsafe(end, write)

        write.add_done_callback(wake)
        return waiter
