"""The policy on a server: as a gateway's upstream, and as the engine of agents in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rllm.errors import ConfigError, InferenceError, RLLMError
from rllm.gateway.upstream import EngineUpstream, UpstreamPool
from rllm.gateway.upstream.base import UpstreamCall
from rllm.gateway.upstream.policy_server import ServedEngine, upstream_of
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer
from rllm.testing.tiny_policy import train_tokenizer

from .held_engine import HeldEngine

ASKED = [{"role": "user", "content": "What is it?"}]
FACTS = {"logprobs_kind": "processed", "template_hash": "abc"}


@pytest.fixture(scope="module")
def tokens() -> TokenPrompts:
    return TokenPrompts(train_tokenizer(["a fig"], vocab_size=300))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedEngine(["A fig."] * 4), model="policy") as server:
        yield server


@pytest.fixture
def held() -> HeldEngine:
    return HeldEngine(["A fig."])


def engine_on(server: ScriptedServer, tokens: TokenPrompts, **options: Any) -> ServedEngine:
    return ServedEngine(server.base_url, model="policy", tokens=tokens, facts=FACTS, **options)


async def test_answer_has_its_weight_version_and_kinds_of_logprobs(
    server: ScriptedServer, tokens: TokenPrompts
) -> None:
    engine = engine_on(server, tokens)
    engine.publish(3)
    output = await engine.get_model_response(ASKED, max_tokens=9, temperature=0.5)
    assert output.content == "A fig."
    assert (output.weight_version, output.logprobs_kind, output.template_hash) == (3, "processed", "abc")
    assert len(output.completion_ids) == len(output.logprobs) == len("A fig.") + 1
    assert output.sampling["temperature"] == 0.5
    [request] = server.requests
    assert (request["model"], request["top_p"], request["max_tokens"]) == ("policy", 1.0, 9)
    engine.publish(4)
    assert (await engine.get_model_response(ASKED)).weight_version == 4
    engine.close()


async def test_streamed_answer_has_its_weight_version(server: ScriptedServer, tokens: TokenPrompts) -> None:
    upstream = engine_on(server, tokens).new_upstream()
    call = UpstreamCall(id="c", request=upstream.prepare({"messages": ASKED, "stream": True}))
    chunks = [chunk async for batch in upstream.stream(call) for chunk in batch]
    assert chunks[0]["rllm"] == FACTS
    assert call.route.weight_version == 0
    await upstream.close()


async def test_calls_wait_while_the_server_is_restarted(server: ScriptedServer, tokens: TokenPrompts) -> None:
    ready, looked = False, threading.Event()

    def is_ready() -> bool:
        looked.set()
        return ready

    engine = engine_on(server, tokens, is_ready=is_ready)
    asked = asyncio.create_task(engine.get_model_response(ASKED))
    assert await asyncio.to_thread(looked.wait, 60)
    assert not server.requests
    ready = True
    assert (await asked).content == "A fig."
    engine.close()


async def test_waiting_calls_fail_with_the_reason_if_the_server_does_not_return(
    server: ScriptedServer, tokens: TokenPrompts
) -> None:
    failure: Exception | None = None
    engine = engine_on(server, tokens, is_ready=lambda: False, failure=lambda: failure)
    waiting = [asyncio.create_task(engine.get_model_response(ASKED)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(call.done() for call in waiting)
    failure = InferenceError("it died; see vllm.log")
    async with asyncio.timeout(60):  # calls without an answer are held for ten minutes
        for call in (*waiting, engine.get_model_response(ASKED)):
            with pytest.raises(InferenceError, match=r"^it died; see vllm\.log$"):
                await call
    assert not server.requests
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_call_that_crashed_its_engine_is_repeated(
    server: ScriptedServer, tokens: TokenPrompts, stream: bool
) -> None:
    server.fault = "error"

    def is_ready() -> bool:
        if server.requests:
            server.fault = None
        return True

    upstream = engine_on(server, tokens, is_ready=is_ready).new_upstream()
    call = UpstreamCall(id="c", request=upstream.prepare({"messages": ASKED, "stream": stream}))
    if stream:
        assert [chunk async for batch in upstream.stream(call) for chunk in batch]
    else:
        assert (await upstream.complete(call))["choices"][0]["message"]["content"] == "A fig."
    assert [retry["fault"] for retry in call.route.retries] == ["broke_off"]
    await upstream.close()


def test_later_turn_continues_the_exact_tokens(server: ScriptedServer, tokens: TokenPrompts) -> None:
    engine = engine_on(server, tokens)
    template = tokens._template
    first = [{"role": "user", "content": "a fig"}]
    known = [*template.render(first), 7, 8]  # no template would render this
    messages = [*first, {"role": "assistant", "content": "??"}, {"role": "user", "content": "a fig"}]
    prompt = engine.continued_prompt(known, messages, 2)
    assert prompt[: len(known)] == known
    assert template.render(messages)[-8:] == prompt[-8:]
    with pytest.raises(ConfigError, match="cannot continue"):
        engine.continued_prompt(known, [*messages, {"role": "assistant", "content": 5}], 2)


def test_gateway_in_front_calls_the_server_directly(server: ScriptedServer, tokens: TokenPrompts) -> None:
    assert isinstance(upstream_of(engine_on(server, tokens), "policy"), UpstreamPool)
    assert isinstance(upstream_of(ScriptedEngine(["x"]), "policy"), EngineUpstream)


def test_agents_may_call_from_several_event_loops_over_one_connection(
    server: ScriptedServer, tokens: TokenPrompts
) -> None:
    engine = engine_on(server, tokens)
    for version in range(3):
        engine.publish(version)
        assert asyncio.run(engine.get_model_response(ASKED)).weight_version == version
    assert len(server.clients) == 1
    engine.close()
    engine.close()


async def asked_of(engine: ServedEngine, held: HeldEngine) -> asyncio.Task[Any]:
    """Start a call, and return it while it is in flight."""
    call = asyncio.create_task(engine.get_model_response(ASKED))
    async with asyncio.timeout(60):
        while held.num_calls == 0:  # noqa: ASYNC110  (made in another thread)
            await asyncio.sleep(0.005)
    return call


async def test_cancelled_agent_cancels_its_call(held: HeldEngine, tokens: TokenPrompts) -> None:
    with ScriptedServer(held, model="policy") as server:
        engine = engine_on(server, tokens)
        call = await asked_of(engine, held)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        held.go.set()
        assert (await engine.get_model_response(ASKED)).content == "A fig."
        engine.close()


async def test_closed_engine_cancels_calls_in_flight(held: HeldEngine, tokens: TokenPrompts) -> None:
    with ScriptedServer(held, model="policy") as server:
        engine = engine_on(server, tokens)
        call = await asked_of(engine, held)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RLLMError, match="was closed"):
            await call
        held.go.set()
