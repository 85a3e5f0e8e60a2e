"""Faulty upstreams: the dialect's own error, the right status, a trace of the failure, and a healthy gateway."""

import asyncio
import contextlib
import json
import threading

import httpx
import pytest

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig, PoolConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import HTTPUpstream, UpstreamPool
from rllm.store.memory import MemoryTraceStore

from .servers import ANSWER, CUT, GOOD, STREAMED, RawServer, event_stream, http

CALLS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


def changed(**choice):
    """Return an answer with a change in its only choice."""
    return http(200, {**ANSWER, "choices": [{**ANSWER["choices"][0], **choice}]})


def logprobs(*numbers):
    return {"content": [{"token": "x", "logprob": number, "bytes": None, "top_logprobs": []} for number in numbers]}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GARBLED = HEAD + CHUNKED + b"not a number of bytes\r\n"
HTML = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 17\r\n\r\n<html>Hi!</html>\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

WRONG = {
    "breaks off": (CUT, 502, "broke off"),
    "sends nothing": (b"\r\n", 502, "broke off"),
    "garbled chunks": (GARBLED, 502, "broke off"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", 502, "does not speak HTTP"),
    "HTML": (HTML, 502, "<html>"),
    "an error page": (http(500, b"<html>oops</html>"), 500, "oops"),
    "an invalid status": (http(999, {"error": {"message": "go away"}}), 502, "go away"),
    "an error instead of an answer": (http(200, {"error": {"message": "no credits"}}), 502, "no credits"),
    "empty": (EMPTY, 502, "not JSON"),
    "half a JSON object": (http(200, b'{"choices": ['), 502, "not JSON"),
    "a JSON list": (http(200, b"[]"), 502, "not a JSON object"),
    "a redirect": (b"HTTP/1.1 302 X\r\nlocation: http://h/\r\ncontent-length: 0\r\n\r\n", 502, "status 302"),
    "no choices": (http(200, {"choices": []}), 502, "choices"),
    "choices of text": (http(200, {"choices": "x"}), 502, "choices"),
    "a finish reason that is a list": (changed(finish_reason=["stop"]), 502, "$.choices[0].finish_reason"),
    "a model that is a list": (http(200, {**ANSWER, "model": ["m"]}), 502, "$.model"),
    "usage as text": (http(200, {**ANSWER, "usage": "little"}), 502, "$.usage"),
    "content that is a number": (changed(message={"content": 5}), 502, "$.choices[0].message.content"),
    "rllm field as text": (http(200, {**ANSWER, "rllm": "raw"}), 502, "$.rllm"),
    "updates of other choices": (http(200, {**ANSWER, "rllm": {"weight_updates": [[], []]}}), 502, "weight_updates"),
    "NaN": (GOOD.replace(b"-0.5", b" NaN"), 502, "not JSON"),
    "infinite": (changed(logprobs=logprobs(-0.5)).replace(b"-0.5", b"-1e999"), 502, "logprob"),
    "null": (changed(logprobs=logprobs(None)), 502, "logprob"),
    "more log-probabilities than ids": (changed(logprobs=logprobs(-0.5, -0.5)), 502, "one log-probability"),
    "more ids than log-probabilities": (changed(token_ids=[7, 8]), 502, "one log-probability"),
    "ids that are text": (changed(token_ids=["a"]), 502, "id"),
}

LOST = [WRONG[name][0] for name in ("breaks off", "sends nothing", "garbled chunks", "no HTTP")]
"""Errors that another server might not have, so that each call was made three times."""

WRONG_STREAMS = {
    "breaks off": (event_stream({"choices": [{"index": 0, "delta": {"content": "h"}}]}, end=False), "broke off"),
    "an event that is not JSON": (STREAMED.replace(b'{"choices"', b'{choices""'), "not JSON"),
    "an error event": (event_stream({"error": {"message": "the engine has died"}}), "the engine has died"),
    "ends too early": (event_stream({"choices": [{"index": 0, "delta": {"content": "h"}}]}), "before the answer was"),
    "a finish reason that is a list": (STREAMED.replace(b'"stop"', b'["st"]'), "$.choices[0].finish_reason"),
    "choice index as text": (STREAMED.replace(b'"index": 0', b'"index":""'), "$.choices[0].index"),
    "rllm field as text": (event_stream({"choices": [], "rllm": "raw"}), "$.rllm"),
    "several answers with one index": (
        event_stream(*({"choices": [{**ANSWER["choices"][0], "delta": {"content": text}}]} for text in "ab")),
        "same index",
    ),
    "missing end": (event_stream(), "before the answer was"),
    "garbled chunks": (event_stream({"choices": [{"delta": {"content": "h"}}]}, end=False) + b"zz\r\n", "broke off"),
    "not a stream": (GOOD, "something else"),
}


class Thread:
    """A raw server in its own event loop."""

    def __init__(self, answer):
        self.server = RawServer(answer)
        self._ready, self._end = threading.Event(), asyncio.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        self._ready.wait(60)
        return self.server

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        async with self.server:
            self._ready.set()
            await self._end.wait()

    def __exit__(self, *exc_info):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)


ODD_ERROR = {"message": ["no"], "type": 5, "code": {"x": 1}, "param": [1]}


async def test_error_object_with_any_types_is_normalized():
    async with RawServer(http(400, {"error": ODD_ERROR})) as server:
        upstream = HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(MemoryTraceStore(), upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.post("/v1/chat/completions", json={"model": "m", **CALLS["chat/completions"]})
        await upstream.close()
    assert answer.json()["error"] == {"message": "['no']", "type": "invalid_request_error", "code": None, "param": None}


@pytest.mark.parametrize("route", CALLS)
async def test_stream_with_empty_finish_reasons_until_its_end_is_valid(route):
    answers = {**ANSWER["choices"][0], "delta": {"content": "h"}, "finish_reason": ""}
    events = [{"choices": [answers]}, {"choices": [answers]}, {"choices": [{**answers, "finish_reason": "stop"}]}]
    async with RawServer(event_stream(*events)) as server:
        store, upstream = MemoryTraceStore(), HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(store, upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            body = {"model": "m", "stream": True, **CALLS[route]}
            answer = await client.post(f"/sessions/s/v1/{route}", json=body)
        await upstream.close()
    assert '"finish_reason":""' not in answer.text
    assert answer.text.count('"finish_reason":"stop"') <= 1
    [trace] = store.by_session("s")
    assert (trace.finish_reason, trace.response["content"], trace.response_ids) == ("stop", "hhh", [7, 7, 7])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("more", [b"[DONE]", b'{"error": {"message": "too late"}}'])
async def test_data_after_the_end_of_a_stream_is_not_read(more, together):
    answers = {**ANSWER["choices"][0], "delta": {"content": "h"}}
    pieces = [b"data: %s\n\n" % piece for piece in (json.dumps({"choices": [answers]}).encode(), b"[DONE]", more)]
    pieces = [b"".join(pieces)] if together else pieces
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    async with RawServer(HEAD.replace(b"application/json", b"text/event-stream") + CHUNKED + body) as server:
        store, upstream = MemoryTraceStore(), HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(store, upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asked = {"model": "m", "stream": True, **CALLS["chat/completions"]}
            answer = await client.post("/sessions/s/v1/chat/completions", json=asked)
        await upstream.close()
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [trace.response_ids for trace in store.by_session("s")] == [[7]]


@pytest.mark.parametrize("rest", [pytest.param(b"", id="broken off"), pytest.param(b"3\r\n: }", id="never ended")])
async def test_complete_answer_is_valid_however_its_connection_ends(rest, monkeypatch):
    monkeypatch.setattr("rllm.gateway.upstream.connection._REST_S", 0.05)
    answers = {**ANSWER["choices"][0], "delta": {"content": "h"}}
    whole = event_stream({"choices": [answers], "prompt_token_ids": [1]}).removesuffix(b"0\r\n\r\n")
    async with RawServer(whole + rest) as server:
        store, upstream = MemoryTraceStore(), HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(store, upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asked = {"model": "m", "stream": True, **CALLS["chat/completions"]}
            for _ in range(2):
                answer = await client.post("/sessions/s/v1/chat/completions", json=asked)
                assert answer.text.endswith("data: [DONE]\n\n")
        await upstream.close()
    assert [trace.error for trace in store.by_session("s")] == [None, None]


@pytest.mark.parametrize("created", [1_700_000_000_000, -1e20, None])
async def test_model_with_any_creation_time_is_listed(created):
    async with RawServer() as server:
        server.models = http(200, {"data": [{"id": "m", "created": created}]})
        upstream = HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(MemoryTraceStore(), upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            listed = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        await upstream.close()
    assert [model["id"] for model in listed.json()["data"]] == ["m"]


async def test_answers_with_the_same_index_are_all_kept():
    choice = ANSWER["choices"][0]
    async with RawServer(http(200, {**ANSWER, "choices": [choice, {**choice, "token_ids": [8]}]})) as server:
        store, upstream = MemoryTraceStore(), HTTPUpstream(server.url)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(store, upstream)), base_url="http://gateway"
        ) as client:
            body = {"model": "m", "n": 2, **CALLS["chat/completions"]}
            answer = await client.post("/sessions/s/v1/chat/completions", json=body)
        await upstream.close()
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    assert [trace.response_ids for trace in store.by_session("s")] == [[7], [8]]


@pytest.fixture(scope="module")
def relay():
    """One gateway with one server, for all its faults."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Thread(GOOD))
        store = MemoryTraceStore()

        upstream = HTTPUpstream(server.url)
        pool = UpstreamPool([server.url], lambda url: upstream, PoolConfig(check_interval_s=0.1))
        gateway = stack.enter_context(GatewayServer(store, pool, GatewayConfig(shutdown_timeout_s=1)))
        client = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=60, verify=False))
        yield server, store, client, upstream


def call(relay, answer, route, session, **more):
    server, store, client, _ = relay
    server.answers[:] = [answer]
    answered = client.post(f"/sessions/{session}/v1/{route}", json={"model": "m", **CALLS[route], **more})
    return answered, store.by_session(session)


def assert_healthy(relay):
    server, _, client, _ = relay
    answered, [trace] = call(relay, GOOD, "chat/completions", f"good-{len(server.requests)}")
    assert (answered.status_code, trace.response_ids, trace.logprobs, trace.error) == (200, [7], [-0.5], None)
    assert "rllm_gateway_requests_in_flight 0.0\n" in client.get("/metrics").text


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("route", CALLS)
def test_invalid_answer_is_an_upstream_failure(relay, wrong, route):
    answer, status, found = WRONG[wrong]
    answered, [trace] = call(relay, answer, route, f"{wrong}-{route}".replace(" ", "-").replace("/", "-"))
    assert answered.status_code == status, answered.text
    shown = answered.json()
    assert found in shown["error"]["message"]
    assert ("type" in shown) is (route == "messages")  # Anthropic's objects are {"type": "error", "error": {...}}.
    assert found in trace.error
    assert (trace.response_ids, trace.finish_reason) == ([], "error")
    retries = trace.metadata.get("rllm.upstream", {}).get("retries", [])
    assert len(retries) == (2 if answer in LOST else 0)
    assert_healthy(relay)


@pytest.mark.parametrize("wrong", WRONG_STREAMS)
@pytest.mark.parametrize("route", CALLS)
def test_invalid_stream_is_an_upstream_failure(relay, wrong, route):
    answer, found = WRONG_STREAMS[wrong]
    answered, [trace] = call(
        relay, answer, route, f"s-{wrong}-{route}".replace(" ", "-").replace("/", "-"), stream=True
    )
    assert found in answered.text
    if answered.status_code == 200:
        payloads = [line[6:] for line in answered.text.splitlines() if line.startswith("data: {")]
        assert any(found in str(json.loads(payload)) for payload in payloads)
    else:
        assert found in answered.json()["error"]["message"]
    assert found in trace.error
    assert trace.finish_reason == "error"
    assert_healthy(relay)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_server_meets_the_deadline(relay, stream, monkeypatch):
    server, _, _, upstream = relay
    server.hold.clear()
    monkeypatch.setattr(upstream._connections, "_read_timeout_s", 0.3)
    try:
        answered, [trace] = call(relay, GOOD, "chat/completions", f"hangs-{stream}", stream=stream)
    finally:
        server.hold.set()
        monkeypatch.undo()
    assert (answered.status_code, trace.finish_reason) == (504, "error")
    assert "did not answer in time" in answered.json()["error"]["message"]
    assert_healthy(relay)


@pytest.mark.parametrize("stream", [False, True])
def test_oversized_answer_is_cut_off(relay, stream, monkeypatch):
    monkeypatch.setattr("rllm.gateway.upstream.connection.Connection.read.__defaults__", (100_000,), raising=False)
    monkeypatch.setattr("rllm.gateway.upstream.http.MAX_ANSWER_BYTES", 100_000)
    huge = {"choices": [{"index": 0, "delta": {"content": "x" * 8_000_000}}]}
    answer = event_stream(huge) if stream else http(200, huge)
    answered, [trace] = call(relay, answer, "chat/completions", f"huge-{stream}", stream=stream)
    assert answered.status_code == 502
    assert "100,000 bytes" in answered.json()["error"]["message"]
    assert trace.finish_reason == "error"
    assert_healthy(relay)
