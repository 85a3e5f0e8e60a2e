"""`OpenAIEngine` against a real server, healthy and failing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rllm.engine.failures import is_transient
from rllm.errors import ConfigError, InferenceError, PromptTooLongError, TokenMismatchError
from rllm.gateway.server import ServerThread
from rllm.inference.engine import ModelOutput
from rllm.inference.openai_engine import OpenAIEngine
from rllm.parser.decoding import SplitText, split_reasoning
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import Fault, ScriptedServer
from rllm.tools import Tool

ASK = [{"role": "user", "content": "2 + 2?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedEngine(["four"])) as server:
        yield server


@asynccontextmanager
async def engine_of(server: ScriptedServer, **settings: Any) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine("scripted", base_url=server.base_url, **{"api_retries": 0, **settings})
    try:
        yield engine
    finally:
        await engine.close()


async def answer(server: ScriptedServer, *, settings: Any = None, **params: Any) -> ModelOutput:
    async with engine_of(server, **(settings or {})) as engine:
        return await engine.get_model_response(ASK, **params)


async def test_answer_has_the_sampled_tokens(server: ScriptedServer) -> None:
    output = await answer(server)
    (sampled,) = server.engine.outputs
    assert (output.text, output.finish_reason) == ("four", "stop")
    assert (output.prompt_ids, output.completion_ids, output.logprobs) == (
        sampled.prompt_ids,
        sampled.completion_ids,
        sampled.logprobs,
    )
    assert output.metrics == {"prompt_tokens": len(sampled.prompt_ids), "completion_tokens": 5.0}


async def test_settings_of_the_rllm_framework_are_accepted(
    server: ScriptedServer,
) -> None:
    known = {"tokenizer": object(), "max_model_length": 4096, "max_response_length": 8, "accumulate_reasoning": False}
    prompt_length = (await answer(server, settings=known)).prompt_length
    assert (await answer(server, settings={**known, "max_prompt_length": prompt_length})).text == "four"
    with pytest.raises(PromptTooLongError, match=f"prompt has {prompt_length} tokens, and max_prompt_length=3"):
        await answer(server, settings={**known, "max_prompt_length": 3})


async def test_every_sampling_parameter_is_sent(server: ScriptedServer) -> None:
    settings = {"sampling_params": {"temperature": 0.5, "min_p": 0.1}, "max_response_length": 3}
    output = await answer(server, settings=settings, top_k=7, stop="x", response_format={"type": "text"}, user="me")
    (sent,) = server.requests
    assert {**sent, "messages": None} == {
        "model": "scripted",
        "messages": None,
        "logprobs": True,
        "return_token_ids": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 3,
        "stop": ["x"],
        "response_format": {"type": "text"},
    }
    assert output.finish_reason == "length"
    expected = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "stop": ["x"], "response_format": {"type": "text"}}
    assert expected.items() <= output.sampling.items()


@pytest.mark.parametrize("default", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", ["max_tokens", "max_completion_tokens"])
async def test_limit_of_a_call_replaces_the_default_under_either_name(
    server: ScriptedServer, default: str, asked: str
) -> None:
    output = await answer(server, settings={"sampling_params": {default: 4}}, **{asked: 2})
    assert (output.completion_length, output.sampling["max_tokens"]) == (2, 2)
    assert (await answer(server, settings={"sampling_params": {default: 4}})).sampling["max_tokens"] == 4


async def test_openai_kind_sends_only_supported_fields(server: ScriptedServer) -> None:
    output = await answer(server, settings={"kind": "openai"}, seed=1)
    (sent,) = server.requests
    assert sent.keys() == {"model", "messages", "logprobs", "temperature", "top_p", "seed"}
    assert (output.text, output.completion_ids, output.logprobs) == ("four", [], [])
    assert output.metrics["completion_tokens"] == 5.0


async def test_openai_address_gets_only_supported_fields(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.base_url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "")
    for host in ("api.openai.com", "openai.example.com"):
        engine = OpenAIEngine("scripted", base_url=f"http://{host}/v1", api_retries=0)
        assert (await engine.get_model_response(ASK, top_k=7)).text == "four"
        await engine.close()
    known, more = (sent.keys() for sent in server.requests)
    assert more - known == {"return_token_ids", "top_k"}


async def test_extra_body_is_sent(server: ScriptedServer) -> None:
    unthinking = {"chat_template_kwargs": {"enable_thinking": False}, "priority": 3, "top_k": 7}
    output = await answer(server, settings={"sampling_params": {"extra_body": unthinking, "temperature": 0.5}})
    await answer(server, extra_body={"min_p": 0.1}, top_k=5)
    first, second = server.requests
    assert {name: first[name] for name in unthinking} == unthinking
    assert (second["min_p"], second["top_k"]) == (0.1, 5)
    assert output.sampling["chat_template_kwargs"] == {"enable_thinking": False}


async def test_tools_and_reasoning_are_passed_through() -> None:
    answers = {"content": "so", "reasoning": "hm", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    with ScriptedServer(ScriptedEngine([answers])) as server:
        output = await answer(server, settings={"tools": [ADD]})
        assert server.requests[0]["tools"] == [ADD]
        tool = Tool(function=lambda a: a, name="add")
        await answer(server, tools=[tool])
        assert server.requests[1]["tools"] == [tool.json]
    assert (output.content, output.reasoning, output.finish_reason) == ("so", "hm", "tool_calls")
    assert output.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert output.to_message()["reasoning_content"] == "hm"
    assert output.text == "<think>\nhm\n</think>\n\nso", "the text includes the reasoning that the server separated"
    assert split_reasoning(output.text) == SplitText("hm", "so")


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("html", 502, "the server answered 502"),
        ("error", 500, "the engine core has died"),
        ("malformed", 502, "JSON .*chatcmpl-1"),
    ],
)
async def test_server_errors_are_transient(server: ScriptedServer, fault: Fault, status: int, message: str) -> None:
    server.fault = fault
    with pytest.raises(InferenceError, match=message) as raised:
        await answer(server)
    assert raised.value.status_code == status
    assert is_transient(raised.value)


async def test_failed_request_is_retried(server: ScriptedServer) -> None:
    server.fault = "error"
    with pytest.raises(InferenceError):
        await answer(server, settings={"api_retries": 1})
    assert len(server.requests) == 2


async def test_contradicting_tokens_raise_an_error(server: ScriptedServer) -> None:
    server.fault = "mismatch"
    with pytest.raises(TokenMismatchError, match=r"5 ids .* has 4 entries"):
        await answer(server)


async def test_answer_without_ids_is_untrainable(server: ScriptedServer) -> None:
    server.fault = "no_tokens"
    output = await answer(server)
    assert (output.text, output.prompt_ids, output.completion_ids, output.logprobs) == ("four", [], [], [])


async def test_overlong_prompt_is_reported() -> None:
    with (
        ScriptedServer(ScriptedEngine(["x"], context_length=8)) as server,
        pytest.raises(PromptTooLongError, match=r"the server answered 400: .* context length is 8") as raised,
    ):
        await answer(server)
    assert not is_transient(raised.value)


async def test_unreachable_server_is_reported(server: ScriptedServer) -> None:
    server.stop()
    with pytest.raises(InferenceError, match=r"http://127.0.0.1:\d+/v1/ cannot be reached"):
        await answer(server)


async def test_slow_server_is_reported() -> None:
    with (
        ScriptedServer(ScriptedEngine(["x"], latency_s=60)) as server,
        pytest.raises(InferenceError, match=r"timeout_s=0.05"),
    ):
        await answer(server, settings={"timeout_s": 0.05})


@pytest.mark.parametrize("body", ["[]", "null", '"x"', "{}", '{"choices": [null]}', '{"choices": [{"message": 3}]}'])
async def test_answer_in_another_format_is_quoted_in_the_error(server: ScriptedServer, body: str) -> None:
    async def odd(request: Any) -> Any:
        return Response(body, media_type="application/json")

    with ServerThread(Starlette(routes=[Route("/v1/chat/completions", odd, methods=["POST"])])) as thread:
        engine = OpenAIEngine("m", base_url=f"{thread.url}/v1", api_retries=0)
        with pytest.raises(InferenceError, match="no choice with a message"):
            await engine.get_model_response(ASK)
        await engine.close()


def test_engine_can_be_used_from_several_event_loops(server: ScriptedServer) -> None:
    engine = OpenAIEngine("scripted", base_url=server.base_url, api_retries=0)

    async def ask() -> str:
        outputs = await asyncio.gather(*(engine.get_model_response(ASK) for _ in range(4)))
        return outputs[0].text

    async def ask_and_close() -> str:
        answers = await ask()
        await engine.close()
        await engine.close()
        return answers

    first = asyncio.new_event_loop()
    assert first.run_until_complete(ask()) == "four"
    assert asyncio.run(ask_and_close()) == "four"
    first.run_until_complete(engine.close())
    first.close()


def test_invalid_settings_are_reported() -> None:
    with pytest.raises(ConfigError, match="base_url='localhost:8000': use an address such as http://"):
        OpenAIEngine("m", base_url="localhost:8000")


async def test_invalid_parameter_is_reported(server: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match="temperature=-1"):
        await answer(server, temperature=-1.0)
    assert server.requests == []
