"""Plain `openai` clients on one side, exact tokens on the other."""

import asyncio
from dataclasses import replace

import pytest
from openai import AsyncOpenAI

from rllm.testing.scripted import TURN_END, ScriptedEngine, encode

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"content": "thinking", "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]}


def assert_exact(trace, output):
    assert trace.prompt_ids == output.prompt_ids
    assert trace.response_ids == output.completion_ids
    assert trace.logprobs == output.logprobs
    assert trace.response["content"] == output.to_message()["content"]
    assert (trace.response.get("tool_calls") or []) == output.tool_calls
    assert trace.finish_reason == output.finish_reason
    assert trace.error is None


def test_answer_has_an_exact_trace(serve, upstream):
    served = serve(["héllo"], upstream=upstream)
    answer = served.client().chat.completions.create(model="m", messages=HI, temperature=0.5)
    assert answer.choices[0].message.content == "héllo"
    assert answer.usage.completion_tokens == len(encode("héllo")) + 1
    [trace] = served.store.by_session("s")
    assert trace.id == answer.id
    assert trace.response_ids == [*encode("héllo"), TURN_END]
    assert_exact(trace, served.engine.outputs[0])
    assert trace.messages == HI
    assert trace.sampling["temperature"] == 0.5
    assert trace.sampling["top_p"] == 1.0


class Seeded(ScriptedEngine):
    """Engine that samples with its own seed, as the embedded engine does for requests without one."""

    async def get_model_response(self, messages, **params):
        output = await super().get_model_response(messages, **params)
        return replace(output, sampling={**output.sampling, "seed": 7})


def test_trace_has_the_sampling_reported_by_the_engine(serve):
    served = serve(Seeded(["hello"]))
    served.client().chat.completions.create(model="m", messages=HI)
    [trace] = served.store.by_session("s")
    assert trace.sampling["seed"] == 7


@pytest.mark.parametrize("answer", ["héllo world", "", CALL, {"reasoning": "hm", "content": "so"}])
def test_stream_gives_the_trace_of_the_whole_answer(serve, upstream, answer):
    served = serve([answer], upstream=upstream)
    create = served.client().chat.completions.create
    whole = create(model="m", messages=HI, tools=TOOLS).choices[0].message
    chunks = list(create(model="m", messages=HI, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (whole.content or "")
    first, second = served.store.by_session("s")
    assert chunks[0].id == second.id != first.id
    assert first.response_ids == second.response_ids
    assert first.logprobs == second.logprobs
    ids = [[call["id"] for call in trace.response.get("tool_calls", [])] for trace in (first, second)]
    for trace, output in zip((first, second), served.engine.outputs, strict=True):
        assert_exact(trace, output)
    assert len(ids[0]) == len(ids[1]) == len(whole.tool_calls or [])


def test_reasoning_is_streamed_before_the_content(serve, upstream):
    served = serve([{"reasoning": "hm", "content": "so"}], upstream=upstream)
    chunks = served.client().chat.completions.create(model="m", messages=HI, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    shown = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
    assert shown[0] == "reasoning_content"
    assert shown[-1] == "content"


def test_finish_reason_is_in_a_separate_chunk_and_usage_on_request(serve, upstream):
    served = serve(["hello"], upstream=upstream)
    create = served.client().chat.completions.create
    plain = list(create(model="m", messages=HI, stream=True))
    assert plain[-1].choices[0].finish_reason == "stop"
    assert plain[-1].choices[0].delta.content is None
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in plain[:-1])
    counted = list(create(model="m", messages=HI, stream=True, stream_options={"include_usage": True}))
    assert counted[-1].choices == []
    assert counted[-1].usage.completion_tokens == 6


def test_stream_helper_of_the_client_accumulates_tool_calls(serve, upstream):
    served = serve([CALL], upstream=upstream)
    with served.client().chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["add", "add"]
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_every_one_of_n_choices_is_captured(serve, upstream, stream):
    served = serve(["one", "two", "three"], upstream=upstream)
    created = served.client().chat.completions.create(model="m", messages=HI, n=3, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in created:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in created.choices]
    traces = served.store.by_session("s")
    assert sorted(texts) == ["one", "three", "two"]
    assert [trace.response["content"] for trace in traces] == texts
    assert len({trace.call_id for trace in traces}) == 1
    assert [trace.id for trace in traces] == [traces[0].call_id, f"{traces[0].call_id}:1", f"{traces[0].call_id}:2"]
    outputs = {output.content: output for output in served.engine.outputs}
    for trace in traces:
        assert_exact(trace, outputs[trace.response["content"]])


def test_token_fields_are_returned_only_on_request(serve, upstream):
    served = serve(["hello"], upstream=upstream)
    plain = served.post().json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    body = {"model": "m", "messages": HI, "return_token_ids": True, "logprobs": True}
    full = served.post(json=body).json()
    assert full["choices"][0]["token_ids"] == [*encode("hello"), TURN_END]
    assert len(full["choices"][0]["logprobs"]["content"]) == 6
    assert full["prompt_token_ids"] == served.engine.outputs[-1].prompt_ids
    streamed = served.post(json={**body, "stream": True}).text
    assert served.post(json={"model": "m", "messages": HI, "stream": True}).text.count("token_ids") == 0
    assert streamed.count('"token_ids":[') >= 1


def test_conversation_keeps_its_parents(serve, upstream):
    served = serve(["one", "two", "three"], upstream=upstream)
    create = served.client().chat.completions.create
    messages, ids = list(HI), []
    for turn in range(3):
        answer = create(model="m", messages=messages, stream=False)
        ids.append(answer.id)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": f"{turn}"}]
    create(model="m", messages=[{"role": "user", "content": "something else"}])
    assert [trace.parent_id for trace in served.store.by_session("s")] == [None, ids[0], ids[1], None]


@pytest.mark.slow
async def test_hundred_concurrent_sessions_are_kept_apart(serve, upstream):
    served = serve(lambda messages: f"echo {messages[-1]['content']}", upstream=upstream, latency_s=0.01)

    async def rollout(number):
        client = AsyncOpenAI(base_url=served.server.session_url(f"s{number}"), api_key="unused", http_client=http)
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"{number}"}], stream=bool(number % 2)
        )
        if number % 2:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return stream.choices[0].message.content

    from openai import DefaultAsyncHttpxClient

    async with DefaultAsyncHttpxClient(verify=False) as http:
        answers = await asyncio.gather(*(rollout(number) for number in range(100)))
    assert answers == [f"echo {number}" for number in range(100)]
    for number in range(100):
        [trace] = served.store.by_session(f"s{number}")
        assert trace.response["content"] == f"echo {number}"


def test_upstream_gets_the_token_request_and_every_sampling_parameter(serve):
    served = serve(["hello"], upstream="http")
    served.client().chat.completions.create(model="m", messages=HI, top_p=0.9)
    [sent] = served.upstream.requests
    assert sent["return_token_ids"] is True
    assert sent["logprobs"] is True
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 0.9, -1)
    [trace] = served.store.by_session("s")
    assert (trace.sampling["temperature"], trace.sampling["top_k"]) == (1.0, -1)
    assert trace.requested_sampling == {}


def test_models_are_listed(serve, upstream):
    served = serve(upstream=upstream)
    assert [model.id for model in served.client().models.list()] == ["scripted"]
