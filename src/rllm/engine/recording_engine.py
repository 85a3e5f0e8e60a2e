"""`RecordingEngine`: an inference engine whose calls are recorded, for agents that need no HTTP.

A call belongs to the session (`rllm.sdk`) that it is made in, as a call through the gateway does; outside of any
session it is not recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from rllm._runtime.ids import new_id
from rllm.capture import Conversations, MessageDigests, failed_trace, parent_of, snapshot, trace_from_output
from rllm.capture.side_calls import OWN_KEY
from rllm.config.sampling import ImposedSampling
from rllm.errors import ConfigError, shown
from rllm.inference.engine import InferenceEngine, ModelOutput, continued_prompt, lost_in_prompt
from rllm.sdk.context import Call, Frame, Session, current_frame
from rllm.store.base import SessionRef, TraceStore
from rllm.telemetry import record_call
from rllm.types import DRIFT_KEY, LOST_KEY, JSONMapping, JSONObject, Message, Trace

_A_MESSAGE = '{"role": "user", "content": "..."}'

_imposed: ContextVar[ImposedSampling] = ContextVar("rllm_imposed_sampling")


@contextmanager
def imposed(sampling: JSONMapping) -> Iterator[None]:
    """Replace the sampling parameters of calls made through a `RecordingEngine` in the block.

    A `seed` among them belongs to the whole block; each call gets one derived from it.
    """
    token = _imposed.set(ImposedSampling(sampling))
    try:
        yield
    finally:
        _imposed.reset(token)


class RecordingEngine:
    """Answers as `inference` does, and records each call in its session, and durably in `store` if there is one."""

    def __init__(self, inference: InferenceEngine, *, store: TraceStore | None = None, model: str = "policy") -> None:
        if not callable(getattr(inference, "get_model_response", None)):
            raise ConfigError(
                f"rollout_engine={shown(inference)}: give an inference engine, such as OpenAIEngine(model=..., "
                "base_url=...)"
            )
        self.inference = inference
        self.store = store
        self.model = model
        self._conversations: WeakKeyDictionary[Session, Conversations] = WeakKeyDictionary()
        self._refs: WeakKeyDictionary[Session, SessionRef] = WeakKeyDictionary()
        """References to the store's sessions, so that a deleted one is not created again."""

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> ModelOutput:
        """Return one answer, with the `id` of its trace; with a store, wait until the trace is durable.

        Raises:
            ConfigError: if several answers are requested at once, or the messages are invalid.
            TokenMismatchError: if the engine's ids and log-probabilities contradict each other.
            InferenceError: if the engine raises it; the failed call is recorded too.
            SessionDeletedError: if the session was deleted from the store.
        """
        check_one_answer(params)
        tools = [getattr(tool, "json", tool) for tool in tools] if tools else None  # a `Tool` has its schema in `json`
        messages = _copied(messages)  # the agent may change its list while the model answers
        imposed_here = _imposed.get(None) or ImposedSampling()
        asked = imposed_here.impose(params, messages, tools, params.get("prompt_token_ids"))
        frame = current_frame()
        if frame is None:
            return await self.inference.get_model_response(messages, tools=tools, **asked)
        call = frame.reserve_call()
        call_id = f"call-{new_id()}"
        started_at, clock = time.time(), time.perf_counter()
        request = {**asked, "messages": messages, "tools": tools, "model": self.model}
        metadata = {**frame.metadata, OWN_KEY: list(frame.uids)}
        shared: JSONObject = {"session_id": frame.name, "started_at": started_at, "metadata": metadata}
        # An agent that asks an engine writes its history itself, so reasoning that it leaves out must stay out.
        known = self._conversations.setdefault(frame.session, Conversations(match_reasoning=True))
        digests = MessageDigests.of(messages, tools, known)
        try:
            if lost := lost_in_prompt(self.inference, messages, tools):
                metadata[LOST_KEY] = list(lost)
            asked |= self._continuing(digests, known, frame.session, request)
            output = await self.inference.get_model_response(messages, tools=tools, **asked)
        except Exception as error:
            failed = failed_trace(request, error=f"{type(error).__name__}: {error}", call_id=call_id, **shared)
            await self._keep(failed, frame, call)
            record_call([failed], error_type=type(error).__name__)
            raise
        timings = {"total_s": time.perf_counter() - clock}
        if "queue_s" in output.metrics:  # seconds in the engine's queue
            timings["queue_s"] = float(output.metrics["queue_s"])
        trace = trace_from_output(
            output,
            call_id=call_id,
            messages=messages,
            tools=tools,
            requested_sampling=params,
            model=self.model,
            timings=timings,
            parent_id=parent_of(output.prompt_ids, frame.session.llm_calls),
            **shared,
        )
        if drift := known.drift_of(digests, output.prompt_ids):
            trace.metadata[DRIFT_KEY] = drift
        await self._keep(trace, frame, call)
        record_call([trace])
        known.add(known.prepare(digests, trace))
        return replace(output, id=call_id)

    def _continuing(
        self, digests: MessageDigests, known: Conversations, session: Session, request: JSONMapping
    ) -> JSONObject:
        """Return the `prompt_token_ids` of a call that continues an earlier answer; empty for others."""
        if missing := known.missing_trace(digests):
            earlier = {trace.id: trace for trace in session.llm_calls}
            known.provide_tokens(digests, earlier.get(missing))
        prior = None if request.get("prompt_token_ids") is not None else known.prior_answer(digests)
        if prior is None:
            return {}
        messages, num_known = request["messages"], prior.num_messages
        ids = continued_prompt(
            self.inference, prior.token_ids, messages, num_known, request, appended_text=prior.appended_text
        )
        return {"prompt_token_ids": ids}

    async def _keep(self, trace: Trace, frame: Frame, call: Call) -> None:
        if self.store is not None:
            # The session that named the calls made here.
            *_, outermost = takewhile(lambda around: around.name == frame.name, frame)
            ref = self._refs.setdefault(outermost.session, SessionRef())
            await asyncio.wrap_future(self.store.add([trace], session=ref))
        call.traces.append(trace)

    def __getattr__(self, name: str) -> Any:
        # Other attributes of the engine, such as its `tokenizer`, except one that would sample without recording.
        if name.startswith("__") or name == "stream_model_response" or "inference" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inference, name)


def recording(engine: InferenceEngine, *, store: TraceStore | None = None) -> RecordingEngine:
    """Return the engine wrapped for recording, unless it is already; see `RecordingEngine`."""
    return engine if isinstance(engine, RecordingEngine) else RecordingEngine(engine, store=store)


def check_one_answer(params: JSONMapping) -> None:
    """Raise `ConfigError` if a call asks for several answers at once."""
    if params.get("n") not in (None, 1):
        raise ConfigError(f"n={params['n']!r}: an engine gives one answer; call it n times, with asyncio.gather")


def _copied(messages: object) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigError(f"messages={shown(messages)}: use a list of messages, such as [{_A_MESSAGE}]")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(f"messages[{place}]={shown(message)}: use a message, such as {_A_MESSAGE}")
    copies: list[Message] = snapshot(list(messages))
    return copies
