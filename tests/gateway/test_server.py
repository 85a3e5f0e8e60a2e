import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rllm.errors import ConfigError, RLLMError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import STOPPED
from rllm.gateway.server import GatewayServer, bind, reserve
from rllm.gateway.sessions import new_session_id
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.types import token_versions

from .held_engine import HeldEngine


def gateway(**config):
    upstream = EngineUpstream(ScriptedEngine(["hello"]), "m")
    return GatewayServer(MemoryTraceStore(), upstream, GatewayConfig(shutdown_timeout_s=1, **config))


def test_server_starts_on_a_free_port_and_leaks_nothing():
    before = set(threading.enumerate())
    with gateway() as server:
        assert httpx.get(f"{server.url}/healthz", timeout=60).json() == {"status": "ok"}
        url = server.url
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz", timeout=60)


def test_reserved_port_is_kept_until_the_gateway_listens():
    address = ("127.0.0.1", reserve("127.0.0.1", 0).getsockname()[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    with socket.socket() as client:
        assert client.connect_ex(address) == errno.ECONNREFUSED, "a call before the gateway starts fails at once"
    with bind(*address), socket.socket() as client:
        assert client.connect_ex(address) == 0


def test_stopping_twice_is_allowed_and_an_unstarted_server_has_no_url():
    server = gateway()
    server.stop()
    with pytest.raises(RLLMError, match="start"):
        _ = server.url


def test_port_in_use_is_reported_and_the_thread_ends():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = set(threading.enumerate())
        with pytest.raises(ConfigError, match=f"port={port}.*choose another port"):
            gateway(port=port).start()
        assert set(threading.enumerate()) <= before, "no new thread is left"


def test_host_that_cannot_be_resolved_is_reported():
    with pytest.raises(ConfigError, match=r"host='nowhere\.invalid'"):
        gateway(host="nowhere.invalid", api_key="k").start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "myhost"])
def test_other_hosts_require_a_key(host):
    with pytest.raises(ConfigError, match="--api-key"):
        GatewayConfig(host=host)
    assert GatewayConfig(host=host, api_key="k").host == host


@pytest.mark.parametrize(
    "config", [{"port": 70000}, {"port": -1}, {"api_key": ""}, {"api_key": "a\nb"}, {"keep_alive_s": 0.0}]
)
def test_invalid_settings_are_rejected(config):
    with pytest.raises(ConfigError):
        GatewayConfig(**config)


def test_everything_but_health_requires_the_key():
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with gateway(api_key="secret") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200
        for path in ("/sessions", "/metrics", "/v1/models", "/sessions/a/traces"):
            assert client.get(path).status_code == 401
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        key = {"authorization": "Bearer secret:rllm-a"}
        assert client.post("/v1/chat/completions", json=body, headers=key).headers["x-rllm-session"] == "a"
        assert client.get("/sessions/a/traces", headers=key).status_code == 200


def test_readiness_checks_the_upstream_and_the_store(serve):
    served = serve(upstream="http")
    assert served.http.get("/readyz").json() == {"ready": True, "problems": {}}
    served.upstream.fault = "html"
    answer = served.http.get("/readyz")
    assert answer.status_code == 503
    assert "Bad Gateway" in answer.json()["problems"]["upstream"]
    served.upstream.fault = None
    served.store.close()
    assert served.http.get("/readyz").json()["problems"].keys() == {"store"}


def test_gateway_is_not_ready_if_the_upstream_is_down():
    with GatewayServer(MemoryTraceStore(), HTTPUpstream("http://127.0.0.1:9")) as server:
        assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 503
        assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 502


def test_metrics_count_calls_traces_and_tokens(serve):
    served = serve(["hello"])
    served.post()
    served.post(json={"messages": []})
    text = served.http.get("/metrics").text
    assert 'rllm_gateway_requests_total{dialect="chat",mode="json",status="200"} 1.0\n' in text
    assert 'rllm_gateway_requests_total{dialect="chat",mode="json",status="400"} 1.0\n' in text
    assert "rllm_gateway_traces_total 2.0\n" in text
    assert "rllm_gateway_failed_traces_total 1.0\n" in text
    assert "rllm_gateway_response_tokens_total 6.0\n" in text
    assert "rllm_gateway_requests_in_flight 0.0\n" in text


def test_session_key_allows_only_calls_and_reads_of_its_session():
    with gateway(api_key="secret") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        operator = {"authorization": "Bearer secret"}
        made = client.post("/sessions", json={"id": "mine"}, headers=operator).json()
        client.post("/sessions", json={"id": "other"}, headers=operator)
        own = {"authorization": f"Bearer {made['api_key']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/sessions/mine/v1/chat/completions", json=body, headers=own).status_code == 200
        assert client.post("/v1/chat/completions", json=body, headers=own).status_code == 200, (
            "the key names the session"
        )
        assert len(client.get("/sessions/mine/traces", headers=own).json()["traces"]) == 2
        assert client.get("/v1/models", headers=own).status_code == 200
        refused = [
            client.post("/sessions/other/v1/chat/completions", json=body, headers=own),
            client.post("/v1/chat/completions", json=body, headers={**own, "x-rllm-session": "other"}),
            client.get("/sessions/other/traces", headers=own),
            client.get("/sessions", headers=own),
            client.post("/sessions", json={"id": "more"}, headers=own),
            client.delete("/sessions/mine", headers=own),
            client.get("/metrics", headers=own),
        ]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(403, "wrong_session")}
        assert made["api_key"] not in str(client.get("/sessions/mine/traces", headers=operator).json())


def test_id_of_a_created_session_can_be_its_key() -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    with gateway(api_key="secret", session_ids_admit=True) as server, httpx.Client(timeout=60) as client:
        name = new_session_id()
        mine, root = server.open_session(name), f"{server.url}/v1"
        named = {"x-rllm-session": name, "authorization": "Bearer somebody-elses"}
        in_key = {"authorization": f"Bearer rllm-{name}"}
        given = [(mine, {}), (mine, {"authorization": "Bearer none"}), (root, named), (root, in_key)]
        for url, headers in given:
            assert client.post(f"{url}/chat/completions", json=asked, headers=headers).status_code == 200
        for url in (root, server.session_url(new_session_id()), server.open_session("chosen")):
            assert client.post(f"{url}/chat/completions", json=asked).status_code == 401
        assert client.get(f"{server.url}/sessions/{name}/traces").status_code == 401
        assert len(server.store.by_session(name)) == len(given)


def test_failed_start_reports_the_reason_and_leaks_nothing(monkeypatch):
    class Upstream(EngineUpstream):
        is_closed = False

        async def close(self):
            self.is_closed = True

    async def fail(self, sockets):
        await self.lifespan.startup()
        raise OSError("no more events")

    monkeypatch.setattr("uvicorn.Server.startup", fail)
    upstream = Upstream(ScriptedEngine(["hello"]), "m")
    before = threading.active_count()
    server = GatewayServer(MemoryTraceStore(), upstream, GatewayConfig(shutdown_timeout_s=1.0))
    with pytest.raises(RLLMError, match=r"did not start: OSError\(.no more events.\)"):
        server.start()
    assert upstream.is_closed
    assert threading.active_count() == before


@pytest.mark.parametrize("stream", [False, True])
def test_call_interrupted_by_shutdown_is_reported_to_its_client_and_in_its_trace(serve, stream, caplog):
    engine = HeldEngine(num_pieces=1)
    served = serve(engine)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, json=body)
        deadline = time.monotonic() + 60
        while not engine.num_calls:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        served.server.stop()
        found = answer.result(timeout=60)
    error = json.loads(found.text.removesuffix("\n\n").rpartition("data: ")[2])["error"]
    assert (found.status_code, error["code"]) == (200 if stream else 503, "stopped")
    [trace] = served.store.by_session("s")
    assert (trace.error, trace.finish_reason) == (STOPPED, "abort")
    assert not [record for record in caplog.records if record.exc_info], "a shutdown logs no traceback"


class UpdatedEngine(ScriptedEngine):
    """Engine with new weights before each answer."""

    def _message(self, answer):
        self.weight_version += 1
        return super()._message(answer)


@pytest.mark.parametrize("stream", [True, False])
def test_each_choice_has_the_weight_version_that_sampled_it(serve, stream):
    served = serve(UpdatedEngine(["one", "two", "three"]))
    served.post(json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "stream": stream})
    traces = served.store.by_session("s")
    assert [trace.weight_version for trace in traces] == [1, 1, 1]
    assert [set(token_versions(trace)) for trace in traces] == [{1}, {2}, {3}]
