import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from rllm.gateway.call_dedup import InFlightCalls
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream, UpstreamPool
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer


@dataclass
class Served:
    """A running gateway over a scripted engine, in process or over HTTP."""

    server: GatewayServer
    engine: ScriptedEngine
    store: Any
    upstream: ScriptedServer | None
    http: httpx.Client
    stack: ExitStack

    def client(self, session_id: str = "s", *, base_url: str | None = None) -> OpenAI:
        base_url = base_url or self.server.session_url(session_id)
        # Without certificates, which take longer to load than a test takes, and which plain HTTP does not need.
        http = DefaultHttpxClient(verify=False)
        return self.stack.enter_context(OpenAI(base_url=base_url, api_key="unused", max_retries=0, http_client=http))

    def post(self, path: str = "/sessions/s/v1/chat/completions", json: Any = None, **options: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if json is None else json
        return self.http.post(path, json=body, **options)

    def ask_and_leave(
        self, path: str = "/sessions/s/v1/chat/completions", json: Any = None, headers: Any = None
    ) -> None:
        """Send a call, and disconnect a moment after the engine has received it."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if json is None else json
        num_before = self.engine.num_calls
        request = self.http.build_request("POST", path, json=body, headers=headers)
        connection = http.client.HTTPConnection(str(request.url.host), request.url.port, timeout=60)
        connection.request("POST", path, request.content, dict(request.headers))
        deadline = time.monotonic() + 60
        while self.engine.num_calls == num_before:
            assert time.monotonic() < deadline, "the engine received no call"
            time.sleep(0.005)
        time.sleep(0.02)
        connection.close()


def start(
    stack, script=("hello",), *, upstream="engine", upstream_port=0, config=None, store=None, **engine_options
) -> Served:
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script, **engine_options)
    store = store or MemoryTraceStore()
    scripted = None
    if upstream == "http":
        scripted = stack.enter_context(ScriptedServer(engine))
        source = HTTPUpstream(scripted.base_url)
    elif upstream == "pool":
        scripted = stack.enter_context(ScriptedServer(engine, port=upstream_port))
        source = UpstreamPool([scripted.base_url])
    else:
        source = EngineUpstream(engine, "scripted")
    config = config or GatewayConfig(shutdown_timeout_s=1.0)
    server = stack.enter_context(GatewayServer(store, source, config))
    http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, verify=False))
    return Served(server=server, engine=engine, store=store, upstream=scripted, http=http, stack=stack)


@pytest.fixture(scope="session")
def end_later():
    """Stop servers while the next tests run: each takes two of uvicorn's pauses of 0.1 s to end."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        endings = []
        yield lambda stack: endings.append(pool.submit(stack.close))
        for ending in endings:
            ending.result(timeout=60)


@pytest.fixture
def serve(end_later):
    """Start gateways that end with the test: `serve(script, upstream="engine" | "http" | "pool", config=...)`."""
    with ExitStack() as stack:
        yield partial(start, stack)
        end_later(stack.pop_all())


@pytest.fixture
def departures(monkeypatch):
    """List to which each request is added when the gateway notices that its client has disconnected."""
    noticed, offer = [], InFlightCalls.offer

    def note(calls, request, call):
        continues = offer(calls, request, call)
        noticed.append(request)
        return continues

    monkeypatch.setattr(InFlightCalls, "offer", note)
    return noticed


@pytest.fixture(scope="module")
def refusing():
    """One gateway for all the requests of a module that never reach its engine."""
    with ExitStack() as stack:
        served = start(stack)
        yield served
        assert served.engine.num_calls == 0


@pytest.fixture(params=["engine", "http"])
def upstream(request):
    """Both kinds of upstream in turn."""
    return request.param
