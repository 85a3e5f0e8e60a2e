"""Attackers send a gateway requests, and answers of its upstream, that are too expensive."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from starlette.types import Scope

from rllm._runtime.untrusted import LARGE
from rllm.capture import ChatStream, SSEDecoder
from rllm.errors import ConfigError, InferenceError, TokenMismatchError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import GatewayError
from rllm.gateway.http_limits import BodyBudget, read_body
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.gateway.upstream.base import UpstreamCall
from rllm.gateway.upstream.http import _read_answer
from rllm.inference.openai_engine import OpenAIEngine
from rllm.parser.answer import IncrementalText
from rllm.store.memory import MemoryTraceStore
from rllm.testing import ScriptedEngine
from rllm.tools.mcp_tool import mcp_tools

MANY_LISTS = b"[" + b"[]," * 2_500_000 + b"[]]"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def gateway() -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        upstream = EngineUpstream(ScriptedEngine(["hello"]), "scripted")
        config = GatewayConfig(shutdown_timeout_s=1.0)
        server = stack.enter_context(GatewayServer(MemoryTraceStore(), upstream, config))
        yield stack.enter_context(httpx.Client(base_url=server.url, timeout=60, verify=False))


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/sessions"]
)
@pytest.mark.parametrize("before", [b'{"model":"m","messages":', b'{"metadata":{"a":'])
def test_request_of_millions_of_lists_is_rejected(gateway: httpx.Client, path: str, before: bytes) -> None:
    answer = gateway.post(path, content=before + MANY_LISTS + b"}")
    assert answer.status_code == 413
    assert "bytes of memory" in answer.text
    assert gateway.post("/v1/chat/completions", json=ASKED).status_code == 200


def test_long_text_of_brackets_is_an_ordinary_request(gateway: httpx.Client) -> None:
    long = {"model": "m", "messages": [{"role": "user", "content": '[],{},"\\' * 700_000}]}
    answer = gateway.post("/v1/chat/completions", json=long)
    assert answer.json()["error"]["code"] == "context_length_exceeded"  # of the scripted model


def request_of(size: int, *, declared: bool = True) -> tuple[Scope, Any]:
    scope = {"type": "http", "headers": [(b"content-length", b"%d" % size)] if declared else []}
    parts = [b"x" * LARGE] * (size // LARGE) + [b"x" * (size % LARGE)]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    return scope, receive


@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies_wait_for_each_other(declared: bool) -> None:
    limits = GatewayConfig(max_body_bytes=4 * LARGE)

    async def ask() -> tuple[int, list[int]]:
        budget = BodyBudget(limits, most=9 * LARGE)
        most_held, held = 0, 0

        async def one() -> int:
            nonlocal held, most_held
            scope, receive = request_of(3 * LARGE, declared=declared)
            body = await read_body(scope, receive, limits, budget)
            held += len(body)
            most_held = max(most_held, held)
            await asyncio.sleep(0)
            held -= len(body)
            budget.release(scope)
            return len(body)

        return most_held, await asyncio.gather(*(one() for _ in range(12)))

    most_held, sizes = asyncio.run(ask())
    assert sizes == [3 * LARGE] * 12
    assert most_held <= 9 * LARGE


def test_large_body_without_memory_gets_retry_after_and_small_ones_pass() -> None:
    limits = GatewayConfig(max_body_bytes=4 * LARGE, body_timeout_s=0.2)

    async def ask() -> GatewayError:
        budget = BodyBudget(limits, most=4 * LARGE)
        await read_body(*request_of(3 * LARGE), limits, budget)
        assert len(await read_body(*request_of(1000), limits, budget)) == 1000
        with pytest.raises(GatewayError) as refused:
            await read_body(*request_of(3 * LARGE), limits, budget)
        return refused.value

    refused = asyncio.run(ask())
    assert refused.status == 503
    assert "retry-after" in refused.headers()


@pytest.mark.parametrize("status", [200, 500])
def test_answer_of_millions_of_lists_is_rejected(status: int) -> None:
    body = b'{"error":' * (status != 200) + b'{"choices":[' + b"[]," * 5_000_000 + b"[]]}" + b"}" * (status != 200)
    call = UpstreamCall(id="c", request=ASKED)
    with pytest.raises(InferenceError, match="bytes of memory" if status == 200 else "status 500"):
        _read_answer(call, status, body, {})


def test_endlessly_nested_answer_is_rejected() -> None:
    body = b'{"id":"x","choices":[{"index":0,"message":{"content":' + b"[" * 90_000
    with pytest.raises(InferenceError, match="not JSON"):
        _read_answer(UpstreamCall(id="c", request=ASKED), 200, body, {})


def test_endless_event_takes_linear_time() -> None:
    decoder: SSEDecoder = SSEDecoder()
    started = time.thread_time()
    for piece in [b"data: ", *[b"x" * 1000] * 30_000]:
        assert decoder.feed(piece) == []
    assert time.thread_time() - started < 2.0  # quadratic code copies 450 GB
    assert len(decoder.feed(b"\n\n")[0]) == 30_000_000


def test_arguments_in_tiny_pieces_take_linear_time() -> None:
    stream = ChatStream()
    started = time.thread_time()
    for _ in range(100_000):
        call = {"index": 0, "function": {"name": "f", "arguments": "x" * 20}}
        stream.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
    [choice] = stream.response()["choices"]
    assert time.thread_time() - started < 4.0  # quadratic code copies 100 GB
    assert len(choice["message"]["tool_calls"][0]["function"]["arguments"]) == 2_000_000


def test_number_of_choices_and_calls_in_an_answer_is_limited() -> None:
    with pytest.raises(TokenMismatchError):
        ChatStream().feed({"choices": [{"index": index, "delta": {}} for index in range(2_000)]})
    calls = [{"index": index, "function": {"name": "f"}} for index in range(20_000)]
    with pytest.raises(TokenMismatchError):
        ChatStream().feed({"choices": [{"index": 0, "delta": {"tool_calls": calls}}]})


class _Bytes:
    """A vocabulary of bytes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def text(self, ids: Any) -> str:
        self.num_decoded += len(ids)
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("unit", [b"\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xff", b"\xe2\x82\xac\x80\x80\xe2"])
@pytest.mark.parametrize("end", [b"", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80", b"ab"])
def test_undecodable_bytes_are_not_decoded_repeatedly(unit: bytes, end: bytes) -> None:
    decoder = _Bytes()
    text = IncrementalText(decoder)  # type: ignore[arg-type]
    ids = unit * (2_000 // len(unit)) + end
    shown = ""
    for token in ids:
        assert text.extend([token]).startswith(shown)
        shown = text.text
    assert ids.decode(errors="replace").startswith(shown)
    assert len(shown) >= 0.9 * len(ids.decode(errors="replace"))
    assert decoder.num_decoded < 200 * len(ids)


class _Compressing(BaseHTTPRequestHandler):
    """A server that compresses its answers without being asked to."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = gzip.compress(bytes(1_000_000))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Endless(_Compressing):
    """A server whose answer is too long."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(10_000):
                self.wfile.write(bytes(100_000))


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), request.param) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("address", "complaint"),
    [(_Compressing, "content-encoding='gzip'"), (_Endless, "longer than")],
    indirect=["address"],
)
def test_answer_of_an_endpoint_is_decompressed_and_read_within_limits(
    address: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.inference.openai_engine._MAX_ANSWER_BYTES", 1_000_000)
    engine = OpenAIEngine("m", base_url=f"{address}/v1", api_key="none", api_retries=0)

    async def ask() -> None:
        try:
            await engine.get_model_response(ASKED["messages"])
        finally:
            await engine.close()

    with pytest.raises(InferenceError, match=complaint):
        asyncio.run(ask())


@pytest.mark.parametrize("address", [_Compressing], indirect=True)
def test_mcp_server_with_compressed_answers_is_rejected(address: str) -> None:
    async def connect() -> None:
        async with mcp_tools(f"{address}/mcp", start_timeout_s=60):
            pass

    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match="content-encoding='gzip'"):
        asyncio.run(connect())
