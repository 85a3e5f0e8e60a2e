"""Through the gateway, in front of a real vLLM: the store has the sampled tokens, in every dialect and over every turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI

from rllm.engine.recording_engine import RecordingEngine
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import HTTPUpstream
from rllm.gateway.upstream.policy_server import ServedEngine
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.sdk import session
from rllm.store.memory import MemoryTraceStore
from rllm.types import DRIFT_KEY, Trace

from .conftest import VLLM

pytestmark = pytest.mark.vllm
QUESTION, NEXT = "the user asks the assistant", "and then?"


@pytest.fixture
def served(vllm: VLLM) -> Iterator[tuple[GatewayServer, MemoryTraceStore]]:
    store = MemoryTraceStore()
    upstream = HTTPUpstream(vllm.url, tokens=TokenPrompts.load(str(vllm.folder)))
    with GatewayServer(store, upstream, GatewayConfig(shutdown_timeout_s=1.0)) as gateway:
        yield gateway, store


def chat(gateway: GatewayServer, turns: int, *, stream: bool, seed: int = 0) -> None:
    with OpenAI(base_url=gateway.session_url("s"), api_key="x") as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for turn in range(turns):
            asked: Any = {"model": "policy", "messages": messages, "max_tokens": 20, "seed": seed + turn}
            if stream:
                chunks = client.chat.completions.create(stream=True, **asked)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            else:
                text = client.chat.completions.create(**asked).choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": NEXT}]


def responses(gateway: GatewayServer, turns: int, *, stream: bool, seed: int = 0) -> None:
    with OpenAI(base_url=gateway.session_url("s"), api_key="x") as client:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(turns):
            asked: Any = {"model": "policy", "input": items, "max_output_tokens": 20}
            if stream:
                *_, last = client.responses.create(stream=True, **asked)
                text = last.response.output_text  # of `response.incomplete`, if it was truncated
            else:
                text = client.responses.create(**asked).output_text
            items += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": NEXT}]


def messages(gateway: GatewayServer, turns: int, *, stream: bool, seed: int = 0) -> None:
    base_url = gateway.session_url("s").removesuffix("/v1")
    with Anthropic(base_url=base_url, api_key="x") as client:
        answers: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(turns):
            asked: Any = {"model": "policy", "messages": answers, "max_tokens": 20}
            if stream:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            text = "".join(block.text for block in answer.content if block.type == "text")
            answers += [{"role": "assistant", "content": text.strip() or "nothing"}, {"role": "user", "content": NEXT}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("converse", [chat, responses, messages])
def test_conversation_is_one_sequence_of_the_tokens_of_the_server(
    vllm: VLLM, served: tuple[GatewayServer, MemoryTraceStore], converse: Callable[..., None], stream: bool
) -> None:
    gateway, store = served
    converse(gateway, 4, stream=stream)
    traces = store.by_session("s")
    assert len(traces) == 4
    for one, other in pairwise(traces):
        known = [*one.prompt_ids, *one.response_ids]
        assert other.prompt_ids[: len(known)] == known
        assert DRIFT_KEY not in other.metadata
    for trace in traces:
        assert_exact(vllm, trace)


def test_several_choices_and_stop_strings_are_captured_exactly(
    vllm: VLLM, served: tuple[GatewayServer, MemoryTraceStore]
) -> None:
    gateway, store = served
    body = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "seed": 3}
    httpx.post(f"{gateway.session_url('s')}/chat/completions", json={**body, "n": 3}, timeout=300).raise_for_status()
    httpx.post(
        f"{gateway.session_url('s')}/chat/completions", json={**body, "stop": ["e"], "temperature": 0.7}, timeout=300
    ).raise_for_status()
    traces = store.by_session("s")
    assert len(traces) == 4
    for trace in traces:
        assert_exact(vllm, trace)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results_are_captured_exactly(
    vllm: VLLM, served: tuple[GatewayServer, MemoryTraceStore], stream: bool
) -> None:
    gateway, store = served
    tool = {"name": "look_up", "arguments": '{"item": "fig"}'}
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    offered = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": tool}]}
    for more in ([], [called, {"role": "tool", "tool_call_id": "c", "content": "7"}]):
        messages = [*messages, *more]
        body = {"model": "policy", "messages": messages, "tools": offered, "max_tokens": 16, "n": 2, "stream": stream}
        httpx.post(f"{gateway.session_url('s')}/chat/completions", json=body, timeout=300).raise_for_status()
    traces = store.by_session("s")
    assert len(traces) == 4
    assert "look_up" in vllm.tokenizer.decode(traces[0].prompt_ids)
    assert '"fig"' in vllm.tokenizer.decode(traces[3].prompt_ids)
    for trace in traces:
        assert_exact(vllm, trace)


async def test_agents_in_this_process_are_captured_as_exactly(vllm: VLLM) -> None:
    store = MemoryTraceStore()
    facts = {"logprobs_kind": "processed"}
    engine = ServedEngine(vllm.url, model="policy", tokens=TokenPrompts.load(str(vllm.folder)), facts=facts)
    recorded = RecordingEngine(engine, store=store)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with session() as here:
        for turn in range(3):
            output = await recorded.get_model_response(messages, max_tokens=20, temperature=0.8, seed=turn)
            messages += [{"role": "assistant", "content": output.content}, {"role": "user", "content": NEXT}]
    engine.close()
    traces = here.llm_calls
    assert len(traces) == 3
    for one, other in pairwise(traces):
        known = [*one.prompt_ids, *one.response_ids]
        assert other.prompt_ids[: len(known)] == known
    for trace in traces:
        assert_exact(vllm, trace)


def assert_exact(vllm: VLLM, trace: Trace) -> None:
    """Check that stored log-probabilities are those of a plain forward pass in float32, at the temperature of the call."""
    assert trace.error is None
    ids = torch.tensor([[*trace.prompt_ids, *trace.response_ids]])
    with torch.no_grad():
        logits = vllm.model(ids).logits[0, len(trace.prompt_ids) - 1 : -1] / trace.sampling.get("temperature", 1.0)
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(trace.response_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(trace.logprobs), chosen, atol=1e-4, rtol=0)
