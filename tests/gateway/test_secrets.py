"""Keys are sent only where they are needed, and agents cannot choose the upstream."""

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import rllm.gateway
from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.upstream import HTTPUpstream
from rllm.store import open_store
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from .servers import ANSWER, RawServer, event_stream, http

GATEWAY_KEY, UPSTREAM_KEY = "k-gateway-7f3a", "k-upstream-d02e"
ANTHROPIC_KEY = f"{GATEWAY_KEY}:rllm-claude"
SECRETS = (GATEWAY_KEY, UPSTREAM_KEY)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TRACE_FILES = ("traces.db", "traces.db-wal", "traces.db-shm")


@pytest.fixture
def upstream():
    with ScriptedServer(ScriptedEngine(["hello"])) as server:
        yield server


def start_gateway(folder, *arguments):
    """Start a gateway as the command line does, with all of its logs in a file."""
    keys = {
        "RLLM_GATEWAY_API_KEY": GATEWAY_KEY,
        "RLLM_UPSTREAM_API_KEY": UPSTREAM_KEY,
    }
    command = [sys.executable, "-m", "rllm", "gateway", "--port", "0", "--store", f"sqlite:///{folder / 'traces.db'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *arguments], env={**os.environ, **keys}, stdout=subprocess.PIPE, stderr=log, text=True
        )
    greeting = process.stdout.readline()
    return process, re.search(r"http://\S+", greeting).group(), greeting


def use_it(client, upstream):
    """Send calls of every kind: valid, rejected, failed upstream, and with a misplaced key."""
    bearer, anthropic = {"authorization": f"Bearer {GATEWAY_KEY}"}, {"x-api-key": ANTHROPIC_KEY}
    answers = [
        client.post("/sessions", json={"id": "s"}, headers=bearer),
        client.post("/sessions/s/v1/chat/completions", json=CHAT, headers=bearer),
        client.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": True}, headers=bearer),
        client.post("/sessions/s/v1/responses", json={"model": "m", "input": "hi"}, headers=bearer),
        client.post("/v1/messages", json={**CHAT, "max_tokens": 5}, headers={**anthropic, "anthropic-version": "1"}),
        client.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {UPSTREAM_KEY}"}),
        client.post("/v1/chat/completions", content=b"{", headers=bearer),
        client.get("/upstreams", headers=bearer),
    ]
    for fault in ("error", "malformed"):
        upstream.fault = fault
        answers.append(client.post("/sessions/s/v1/chat/completions", json=CHAT, headers=bearer))
    upstream.fault = None
    paths = ("/metrics", "/sessions", "/sessions/s/traces", "/sessions/claude/traces", "/v1/models", "/readyz", "/no")
    return [*answers, *(client.get(path, headers=bearer) for path in paths)]


@pytest.mark.slow
def test_keys_are_never_stored_logged_or_exported(upstream, tmp_path):
    process, url, greeting = start_gateway(tmp_path, "--upstream", upstream.base_url)
    try:
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            answers = use_it(client, upstream)
        stored = b"".join(path.read_bytes() for path in map(tmp_path.joinpath, TRACE_FILES) if path.exists())
        process.send_signal(signal.SIGTERM)
        content = greeting + process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    own_key = answers[0].json()["api_key"]
    assert [answer.status_code for answer in answers[:8]] == [200, 200, 200, 200, 200, 401, 400, 200]
    with open_store(f"sqlite:///{tmp_path / 'traces.db'}") as store:
        traces = [trace for info in store.sessions() for trace in store.by_session(info.id)]
        assert len(traces) == 7
    logs = (tmp_path / "log").read_text()
    places = {
        "store file": stored.decode("latin-1"),
        "traces": repr([trace.to_dict() for trace in traces]),
        "logs": logs,
        "output": content,
        "answers": "".join(f"{answer.headers}{answer.text}" for answer in answers[1:]),
    }
    for place, text in places.items():
        for secret in (*SECRETS, own_key):
            assert secret not in text, place


class Listener:
    """An inference server that records every received byte."""

    def __init__(self):
        self.received = b""
        self.num_connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info):
        self._server.close()

    async def _accept(self, reader, writer):
        self.num_connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.received += head
            if length := re.search(rb"(?i)content-length: (\d+)", head):
                self.received += await reader.readexactly(int(length.group(1)))
            writer.write(http(200, ANSWER, "connection: close"))
            await writer.drain()


@contextlib.asynccontextmanager
async def gateway_to(listener, **config):
    upstream = HTTPUpstream(f"http://127.0.0.1:{listener.port}/v1", api_key=UPSTREAM_KEY)
    app = create_app(MemoryTraceStore(), upstream, GatewayConfig(**config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client
    await upstream.close()


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_headers_of_an_agent_are_not_sent_to_the_upstream(header):
    key = "agents-own-key"
    async with Listener() as listener, gateway_to(listener) as client:
        headers = {header: f"Bearer {key}", "cookie": key, "x-anything": key, "openai-organization": key}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    assert key.encode() not in listener.received
    assert f"Bearer {UPSTREAM_KEY}".encode() in listener.received


@pytest.mark.parametrize("stream", [False, True])
async def test_key_repeated_in_an_error_of_the_server_is_redacted(stream):
    expected_message = f"no such key: Bearer {UPSTREAM_KEY}"
    async with RawServer(
        http(401, {"error": {"message": expected_message}}), http(500, expected_message.encode())
    ) as server:
        store, upstream = MemoryTraceStore(), HTTPUpstream(server.url, api_key=UPSTREAM_KEY)
        app = create_app(store, upstream)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            for status in (401, 500):
                answer = await client.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": stream})
                assert answer.status_code == status
                assert "no such key: Bearer ***" in answer.text
        await upstream.close()
    assert all("Bearer ***" in str(trace.error) for trace in store.by_session("s"))
    assert UPSTREAM_KEY not in repr(store.by_session("s"))


async def store_and_answer_of(server, key, stream):
    """Return the store and the answer for an agent, of a call to a server with this key."""
    store, upstream = MemoryTraceStore(), HTTPUpstream(server.url, api_key=key)
    transport = httpx.ASGITransport(create_app(store, upstream))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        found = await client.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": stream})
    await upstream.close()
    return store, found


@pytest.mark.parametrize("stream", [False, True])
async def test_key_repeated_in_an_answer_is_redacted(stream):
    error = {"error": {"message": f"no such key: Bearer {UPSTREAM_KEY}", "code": UPSTREAM_KEY}}
    async with RawServer(event_stream(error) if stream else http(200, error)) as server:
        store, found = await store_and_answer_of(server, UPSTREAM_KEY, stream)
    assert "no such key: Bearer ***" in found.text
    assert UPSTREAM_KEY not in found.text + repr(store.by_session("s"))


_ESCAPED_KEY = "sk-upstream/0123456789"
_ERROR_WITH_KEY = b'{"error": {"message": "no such key: ' + _ESCAPED_KEY.replace("/", "\\/").encode() + b'"}}'


@pytest.mark.parametrize(
    ("stream", "answer"),
    [
        (False, http(401, _ERROR_WITH_KEY)),
        (True, http(401, _ERROR_WITH_KEY)),
        (True, http(200, _ERROR_WITH_KEY)),
        (False, http(200, f"no such key: {_ESCAPED_KEY}".encode())),
        (True, http(200, f"no such key: {_ESCAPED_KEY}".encode())),
        (False, http(200, f'"no such key: {_ESCAPED_KEY}"'.encode())),
        (True, event_stream(_ESCAPED_KEY)),
    ],
)
async def test_key_in_another_encoding_or_field_is_redacted(stream, answer):
    async with RawServer(answer) as server:
        store, found = await store_and_answer_of(server, _ESCAPED_KEY, stream)
    assert "***" in found.text
    (trace,) = store.by_session("s")
    assert _ESCAPED_KEY not in found.text + repr(trace)


ROUTES = {
    "chat/completions": CHAT,
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {**CHAT, "max_tokens": 5},
}
ADDRESS_FIELDS = (
    *("base_url", "api_base", "url", "upstream", "upstream_url", "endpoint", "host", "proxy", "server"),
    *("api_key", "deployment", "extra_body", "extra_headers", "metadata", "router", "user_config", "litellm_params"),
)


@pytest.mark.parametrize("route", ROUTES)
async def test_agent_cannot_choose_the_upstream_of_its_call(route):
    async with Listener() as listener, Listener() as elsewhere, gateway_to(listener) as client:
        address = f"http://127.0.0.1:{elsewhere.port}/v1"
        fields = dict.fromkeys(ADDRESS_FIELDS, address)
        fields |= {
            name: {"base_url": address, "api_base": address} for name in ("metadata", "extra_body", "extra_headers")
        }
        headers = {
            "host": f"127.0.0.1:{elsewhere.port}",
            **dict.fromkeys(("x-forwarded-host", "forwarded", "x-upstream", "x-original-url", "x-base-url"), address),
            **dict.fromkeys(("referer", "origin", "location", "x-rewrite-url", "x-rllm-upstream"), address),
            "x-rllm-metadata": "%7B%22base_url%22%3A%22" + address.replace("/", "%2F") + "%22%7D",
        }
        body = {**ROUTES[route], "model": address, **fields}
        for path in (f"/v1/{route}", f"/v1/{route}?base_url={address}&upstream={address}"):
            await client.post(path, json=body, headers=headers)
        for path in (
            f"/{address}/v1/{route}",
            f"//127.0.0.1:{elsewhere.port}/v1/{route}",
            f"/sessions/..%2f@x/v1/{route}",
        ):
            await client.post(path, json=body, headers=headers)
        await client.get(f"/v1/models/{address}", headers=headers)
        assert listener.num_connections > 0
        assert elsewhere.num_connections == 0


async def test_request_line_with_an_address_goes_to_the_upstream(serve):
    """The request format of clients that use proxies."""
    served = serve()
    async with Listener() as elsewhere:
        host, port = served.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        line = b"POST http://127.0.0.1:%d/v1/chat/completions HTTP/1.1\r\n" % elsewhere.port
        writer.write(line + b"host: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert elsewhere.num_connections == 0
    assert served.engine.num_calls == 1


def test_keys_are_compared_in_constant_time():
    """Keys, codes and credentials are not compared by `==`, `!=` or `in`."""
    suspects = re.compile(r"\b(api_key|_key|mac|presented|authorization|secret|token)\b")
    for path in Path(rllm.gateway.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                assert not any(suspects.search(side) for side in sides), f"{path.name}:{node.lineno}: {sides}"
