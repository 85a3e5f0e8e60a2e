"""A full disk, a read-only disk and a locked database, under a running gateway."""

import json
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rllm.gateway import core
from rllm.store import writer
from rllm.store.sqlite import SqliteTraceStore

from ..waiting import wait_for

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ROUTES = {
    "chat/completions": CHAT,
    "responses": {"model": "m", "input": "hi"},
    "messages": {**CHAT, "max_tokens": 9},
}


@contextmanager
def locked(path):
    """Hold the lock of a long write in another process."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def ask(served, route="chat/completions", **fields):
    return served.post(f"/sessions/s/v1/{route}", json={**ROUTES[route], **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_locked_database_fails_calls_until_it_is_unlocked(serve, tmp_path, route, stream):
    with SqliteTraceStore(tmp_path / "traces.db", timeout_s=0.05) as store:
        served = serve(["one", "two", "three"], store=store)
        first = ask(served, route, stream=stream)
        with locked(store.path):
            refused = ask(served, route, stream=stream)
        last = ask(served, route, stream=stream)
        assert first.status_code == last.status_code == 200
        assert refused.status_code == (200 if stream else 500)
        assert "locked: another process is writing" in refused.text
        assert "[DONE]" not in refused.text
        assert "message_stop" not in refused.text
        assert "response.completed" not in refused.text
        assert [trace.response["content"] for trace in store.by_session("s")] == ["one", "three"]
        assert served.http.get("/healthz").status_code == 200
        assert served.http.get("/readyz").status_code == 200


def test_calls_wait_for_a_slow_disk_while_the_gateway_responds(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_WAITING", 8)
    monkeypatch.setattr(core, "MAX_PENDING", 1)
    with SqliteTraceStore(tmp_path / "traces.db") as store, ThreadPoolExecutor(16) as agents:
        served = serve([str(number) for number in range(16)], store=store)
        with locked(store.path):
            answers = [agents.submit(ask, served)]
            wait_for(lambda: "rllm_gateway_store_pending 1.0\n" in served.http.get("/metrics").text)
            answers += [agents.submit(ask, served, stream=bool(number % 2)) for number in range(15)]
            wait_for(lambda: "rllm_gateway_requests_in_flight 16.0\n" in served.http.get("/metrics").text)
            assert served.engine.num_calls == 1
        assert {answer.result(60).status_code for answer in answers} == {200}
        assert len(store.by_session("s")) == 16


def test_invalid_requests_are_rejected_while_nothing_can_be_stored(serve, tmp_path, caplog):
    with SqliteTraceStore(tmp_path / "traces.db", timeout_s=0.05) as store:
        served = serve(["one"], store=store)
        with locked(store.path):
            refused = ask(served, temperature="hot")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "temperature='hot': use a number")
        assert store.by_session("s") == []
    assert "its trace could not be stored" in caplog.text


def test_invalid_requests_are_rejected_while_sessions_cannot_be_read(serve, tmp_path):
    store = SqliteTraceStore(tmp_path / "traces.db")
    served = serve(["one"], store=store)
    store.close()
    refused = served.post("/sessions/new/v1/chat/completions", json={"model": "m"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


GATEWAY = """
import json, random, resource, string, sys
import httpx
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store.sqlite import SqliteTraceStore
from rllm.testing.scripted import ScriptedEngine

NOISE = "".join(random.Random(0).choices(string.ascii_letters + string.digits, k=20_000))
CHAT = {"model": "m", "messages": [{"role": "user", "content": NOISE}]}
UNLIMITED = resource.RLIM_INFINITY
store = SqliteTraceStore(sys.argv[1])
upstream = EngineUpstream(ScriptedEngine(lambda messages: NOISE[:500]), "m")
acknowledged, refused = [], []
with GatewayServer(store, upstream, GatewayConfig(shutdown_timeout_s=1)) as server:
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        def ask(number):
            answer = client.post(f"/sessions/s{number}/v1/chat/completions", json=CHAT)
            (acknowledged if answer.status_code == 200 else refused).append((number, answer.json()))
        ask(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, UNLIMITED))
        for number in range(1, 16):
            ask(number)
        alive = client.get("/healthz").status_code
        num_refused = len(refused)
        resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        ask(99)
kept = sum(answer["id"] in [trace.id for trace in store.by_session(f"s{number}")] for number, answer in acknowledged)
store.close()
sys.stdout.write(json.dumps({
    "kept": kept, "acknowledged": len(acknowledged), "refused": num_refused, "after": len(refused) - num_refused,
    "alive": alive, "last": acknowledged[-1][0], "cause": refused[0][1]["error"],
}))
"""


@pytest.mark.slow
def test_full_disk_fails_calls_until_it_has_space(tmp_path):
    output = subprocess.check_output([sys.executable, "-c", GATEWAY, str(tmp_path / "traces.db")], text=True)
    seen = json.loads(output)
    assert seen["kept"] == seen["acknowledged"] == 17 - seen["refused"]
    assert seen["refused"] > 3
    assert (seen["alive"], seen["after"], seen["last"]) == (200, 0, 99)
    assert seen["cause"]["type"] == "server_error"
    assert "not acknowledged, because its trace was not stored" in seen["cause"]["message"]
    assert "traces.db" in seen["cause"]["message"]


def test_missing_disk_fails_calls_until_it_is_back(serve, tmp_path):
    with SqliteTraceStore(tmp_path / "disk" / "traces.db") as store:
        served = serve(["one", "two", "three"], store=store)
        assert ask(served).status_code == 200
        (tmp_path / "disk").rename(tmp_path / "unplugged")
        refused = ask(served)
        assert (refused.status_code, "moved or replaced" in refused.text) == (500, True)
        assert served.http.get("/readyz").status_code == 503
        (tmp_path / "unplugged").rename(tmp_path / "disk")
        assert ask(served).status_code == served.http.get("/readyz").status_code == 200
        kept = [trace.response["content"] for trace in store.by_session("s")]
        assert {"one", "three"} <= set(kept), "acknowledged calls are stored"


@pytest.mark.slow
def test_gateway_does_not_start_with_a_read_only_disk():
    command = [sys.executable, "-m", "rllm", "gateway", "--upstream", "http://127.0.0.1:9", "--port", "0"]
    ended = subprocess.run(
        [*command, "--store", "sqlite:////proc/traces.db"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert "/proc/traces.db" in ended.stderr
    assert "Traceback" not in ended.stderr
