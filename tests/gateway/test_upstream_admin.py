"""Routes that change the upstreams of a running gateway, and access to them."""

import threading
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig, PoolConfig
from rllm.gateway.identity import session_key
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import UpstreamPool
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted_server import ScriptedServer

from .held_engine import HeldEngine
from .servers import ANSWER, RawServer, event_stream, http

OPERATOR = {"authorization": "Bearer key"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/sessions/s/v1/chat/completions"


class Pooled:
    """A gateway with a key and a number of scripted servers."""

    def __init__(self, stack, *, num=1, config=None, **pool_config):
        self.engines = [HeldEngine(["hello"]) for _ in range(num)]
        self.go()
        self.servers = [stack.enter_context(ScriptedServer(engine)) for engine in self.engines]
        self.store = MemoryTraceStore()
        pool = UpstreamPool([server.base_url for server in self.servers], config=PoolConfig(**pool_config))
        config = config or GatewayConfig(api_key="key", shutdown_timeout_s=1)
        self.gateway = stack.enter_context(GatewayServer(self.store, pool, config))
        self.http = stack.enter_context(httpx.Client(base_url=self.gateway.url, timeout=60, verify=False))

    def go(self):
        for engine in self.engines:
            engine.go.set()

    def hold(self):
        """Answer nothing before `go`."""
        for engine in self.engines:
            engine.go.clear()

    def ask(self, path=CHAT, **options):
        return self.http.post(path, json=BODY, headers={"authorization": "Bearer key"}, **options)

    def operate(self, method, path, body=None, headers=OPERATOR):
        return self.http.request(method, path, json=body, headers=headers)


@pytest.fixture
def pooled(end_later):
    with ExitStack() as stack:
        yield partial(Pooled, stack)
        end_later(stack.pop_all())


def test_state_of_the_upstreams_is_returned(pooled):
    served = pooled(num=2)
    served.ask()
    shown = served.operate("GET", "/upstreams").json()
    assert (shown["paused"], shown["weight_version"], shown["waiting"], shown["in_flight"]) == (False, None, 0, 0)
    first, second = shown["replicas"]
    assert first == {
        "id": 1,
        "url": served.servers[0].base_url,
        "state": "up",
        "problem": None,
        "in_flight": 0,
        "num_calls": first["num_calls"],
    }
    assert sorted((first["num_calls"], second["num_calls"])) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_server_without_weight_version_keeps_the_published_one(stream):
    unknown = {"rllm": {"weight_version": None}}
    whole = http(200, {**ANSWER, **unknown})
    choice = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop", "token_ids": [7], "logprobs": None}
    async with RawServer(event_stream({"choices": [choice], **unknown}) if stream else whole) as server:
        pool = UpstreamPool([server.url])
        pool.publish(6)
        store = MemoryTraceStore()
        app = create_app(store, pool)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            await client.post("/sessions/s/v1/chat/completions", json=body)
        await pool.close()
    [trace] = store.by_session("s")
    assert trace.weight_version == 6


def test_weight_update_pauses_drains_publishes_and_resumes(pooled):
    served = pooled()
    served.operate("POST", "/upstreams/version", {"version": 6})
    served.ask()
    assert served.operate("POST", "/upstreams/pause").json()["paused"] is True
    ready = served.http.get("/readyz", headers={"authorization": "Bearer key"}).json()
    assert ready["problems"]["upstream"].startswith("the upstreams are paused")
    answers = []
    held = threading.Thread(target=lambda: answers.append(served.ask()))
    held.start()
    while served.operate("GET", "/upstreams").json()["waiting"] != 1:
        threading.Event().wait(0.01)
    assert served.operate("POST", "/upstreams/resume", {"version": 7}).json()["paused"] is False
    held.join()
    assert answers[0].status_code == 200
    before, after = served.store.by_session("s")
    assert (before.weight_version, after.weight_version) == (6, 7)
    assert after.timings["queue_s"] > 0
    assert "queue_s" not in before.timings
    assert served.http.get("/readyz").status_code == 200


def test_held_stream_is_kept_alive(pooled):
    served = pooled(config=GatewayConfig(api_key="key", keep_alive_s=0.05, shutdown_timeout_s=1))
    served.operate("POST", "/upstreams/pause")
    with served.http.stream("POST", CHAT, json={**BODY, "stream": True}, headers=OPERATOR) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b": keep-alive\n\n"
        served.operate("POST", "/upstreams/resume")
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def guarded():
    with ExitStack() as stack:
        yield Pooled(stack)


CHANGES = [
    ("POST", "/upstreams/pause", {}),
    ("POST", "/upstreams/resume", {}),
    ("POST", "/upstreams/version", {"version": 1}),
]


@pytest.mark.parametrize(("method", "path", "body"), [("GET", "/upstreams", None), *CHANGES])
def test_admin_routes_require_the_gateway_key(guarded, method, path, body):
    own = session_key("key", "s", 1)
    guarded.operate("POST", "/sessions", {"id": "s"})
    for presented, status in (("", 401), ("Bearer top", 401), ("Basic key", 401), (f"Bearer {own}", 403)):
        refused = guarded.operate(method, path, body, {"authorization": presented} if presented else {})
        assert refused.status_code == status
    assert state_of(guarded) == (False, 1)


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_admin_routes_are_read_only_without_any_key(pooled, method, path, body):
    served = pooled(config=GatewayConfig(shutdown_timeout_s=1))
    refused = served.operate(method, path, body, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_required")
    assert served.operate("GET", "/upstreams", None, {}).json()["replicas"][0]["state"] == "up"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "expected_message"),
    [
        ("POST", "/upstreams/version", [], 400, "a JSON array: send an object with version"),
        ("POST", "/upstreams/pause", {"id": 9}, 400, "'id'"),
        ("POST", "/upstreams/version", {}, 400, "'version' is missing"),
        ("POST", "/upstreams/version", {"version": -1}, 400, "version=-1"),
        ("POST", "/upstreams/resume", {"version": 2**60}, 400, "version=1152"),
        ("POST", "/upstreams/version", {"version": True}, 400, "version=True"),
        ("POST", "/upstreams/version", {"version": "7"}, 400, "version='7'"),
    ],
)
def test_invalid_requests_report_the_error(guarded, method, path, body, status, expected_message):
    refused = guarded.operate(method, path, body)
    assert refused.status_code == status
    assert expected_message in refused.json()["error"]["message"]
    assert state_of(guarded) == (False, 1)


def state_of(served):
    shown = served.operate("GET", "/upstreams").json()
    return shown["paused"], len(shown["replicas"])
