"""Inference server of a training run, as the upstream of a gateway and as the engine of agents in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from rllm._runtime.ids import new_id
from rllm._runtime.threads import EventLoopThread
from rllm.capture import SAMPLING_FIELDS, PriorAnswer
from rllm.errors import ConfigError
from rllm.gateway.config import PoolConfig
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.base import Upstream, UpstreamCall
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.gateway.upstream.http import HTTPUpstream
from rllm.gateway.upstream.pool import UpstreamPool
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.engine import InferenceEngine, ModelOutput, output_of_answer
from rllm.types import JSONMapping, Message


class ServedEngine:
    """The policy on a server: an engine for agents of this process, in any event loop, and an upstream for gateways."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        tokens: TokenPrompts,
        facts: JSONMapping,
        is_ready: Callable[[], bool] = lambda: True,
        failure: Callable[[], Exception | None] = lambda: None,
        api_key: str | None = None,
        hold_timeout_s: float = 600.0,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            url: URL of the server, up to and including `/v1`.
            model: name under which it serves the policy.
            tokens: prompts and answers by the policy's tokenizer.
            facts: facts about every answer, see `FACTS_KEY`.
            is_ready: returns whether calls may be sent; until then they wait.
            failure: returns the error after which the server will never be ready again, if any; calls fail with it.
            api_key: the server's key, if it needs one.
            hold_timeout_s: seconds for which calls wait while it is not ready.
        """
        self._url = url
        self._connect = partial(
            HTTPUpstream, model=model, tokens=tokens, facts=facts, api_key=api_key, check_ready=self._check_ready
        )
        self._is_ready, self._failure = is_ready, failure
        self._hold_timeout_s = hold_timeout_s
        self._tokens = tokens
        self._lock = threading.Lock()
        self._pools: WeakSet[UpstreamPool] = WeakSet()
        self._thread: EventLoopThread | None = None
        self.weight_version = 0
        self._own = self.new_upstream()

    def new_upstream(self) -> UpstreamPool:
        """Return the server as an upstream for one event loop."""
        pool = UpstreamPool([self._url], self._connect, PoolConfig(hold_timeout_s=self._hold_timeout_s))
        with self._lock:
            pool.publish(self.weight_version)
            self._pools.add(pool)
        return pool

    def _check_ready(self) -> None:
        if (failure := self._failure()) is not None:
            raise UpstreamError(str(failure), status_code=503, fault="lost") from failure
        if not self._is_ready():
            raise UpstreamError(
                f"the upstream {self._url} is being restarted with the current weights", fault="unreachable"
            )

    def publish(self, weight_version: int) -> None:
        """Set the version of the weights that the server has from now on. Thread-safe."""
        with self._lock:
            self.weight_version = weight_version
            for pool in self._pools:
                pool.publish(weight_version)

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> ModelOutput:
        """See `InferenceEngine`; `prompt_token_ids` among the parameters replaces the rendered prompt."""
        prompt_ids = params.pop("prompt_token_ids", None)
        upstream = self._own
        asked = {"messages": list(messages), "tools": list(tools) if tools else None, **params}
        call = UpstreamCall(
            id=f"call-{new_id()}", request=upstream.prepare(asked), prompt_ids=prompt_ids, logprob_details=False
        )
        with self._lock:  # One thread has the connections for all event loops: each rollout may have its own loop.
            thread = self._thread = self._thread or EventLoopThread(f"calls to {self._url}")
        answer = await thread.run(partial(upstream.complete, call))
        sampling = {name: call.request[name] for name in SAMPLING_FIELDS if name in call.request}
        return replace(output_of_answer(answer, sampling), weight_version=call.route.weight_version)

    def continued_prompt(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        *,
        tools: Sequence[JSONMapping] | None = None,
        template_kwargs: JSONMapping | None = None,
        appended_text: str = "",
    ) -> Sequence[int]:
        """See `FullEngine`."""
        request = {"messages": list(messages), "tools": tools, "chat_template_kwargs": template_kwargs}
        prior = PriorAnswer(trace_id="", num_messages=num_known, token_ids=known_ids, appended_text=appended_text)
        prompt_ids = self._tokens.continued(request, prior)
        if prompt_ids is None:
            raise ConfigError("the template cannot continue these messages")
        return prompt_ids

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        """See `ChatTemplate.lost`."""
        return self._tokens.lost(messages, tools)

    def close(self) -> None:
        """End the calls of this process, and close their connections; a gateway closes its own upstream. Repeatable."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(self._own.close)


def upstream_of(engine: InferenceEngine, model_name: str) -> Upstream:
    """Return the upstream of a gateway in front of an engine: the engine itself, or its server."""
    return engine.new_upstream() if isinstance(engine, ServedEngine) else EngineUpstream(engine, model_name)
