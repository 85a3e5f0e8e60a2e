"""Several gateways over one store: sessions deleted through one of them are gone for the others."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rllm.gateway.config import GatewayConfig
from rllm.store import open_store
from rllm.store.maintenance import Retention, prune
from rllm.testing.scripted import ScriptedEngine

from ..store.conftest import REQUIRED, postgres, postgres_url  # noqa: F401  # Fixtures.
from .held_engine import HeldEngine

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

ON_POSTGRES = pytest.param(
    "postgres",
    marks=[
        pytest.mark.postgres,
        pytest.mark.skipif(
            not REQUIRED, reason="`make test-postgres` runs these: the store's own tests start a server already"
        ),
    ],
)


@pytest.fixture(params=["sqlite", ON_POSTGRES])
def open_shared(request, tmp_path):
    """Open the same store once more, as another process would."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "traces.db")
    stores = []

    def open_once_more():
        stores.append(open_store(url))
        return stores[-1]

    yield open_once_more
    for store in stores:
        store.close()


def ask_while(served, engine, meanwhile, body=HI):
    """Send a call of the session `s`, run `meanwhile` once the engine has received it, and return the answer."""
    num_before = engine.num_calls
    with ThreadPoolExecutor(1) as agent:
        under_way = agent.submit(served.post, json=body)
        deadline = time.monotonic() + 60
        while engine.num_calls == num_before:
            assert time.monotonic() < deadline, "the engine received no call"
            time.sleep(0.005)
        meanwhile()
        engine.go.set()
        return under_way.result(60)


def continuation_of(answer):
    """Return the next turn after this answer."""
    return {
        **HI,
        "messages": [*HI["messages"], answer.json()["choices"][0]["message"], {"role": "user", "content": "on"}],
    }


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("begun", ["by a call", "by opening", "by another"])
def test_call_of_a_session_deleted_by_another_gateway_leaves_nothing(serve, open_shared, begun, stream):
    engine = HeldEngine(["hello"])
    one, other = serve(store=open_shared()), serve(engine, store=open_shared())
    if begun == "by a call":
        engine.go.set()
        other.post()
        engine.go.clear()
    else:
        (one if begun == "by another" else other).http.post("/sessions", json={"id": "s"})

    def delete():
        assert one.http.delete("/sessions/s").status_code == 200

    answer = ask_while(other, engine, delete, {**HI, "stream": stream})
    assert "session_deleted" in answer.text
    assert stream or answer.status_code == 410
    assert one.store.session("s") is None
    assert other.post().status_code == 200
    [trace] = one.store.by_session("s")
    assert trace.parent_id is None


def delete_through_another(one):
    assert one.http.delete("/sessions/s").status_code == 200


def prune_session(one):
    assert prune(one.store, Retention(keep_days=1e-9)).num_sessions == 1


@pytest.mark.parametrize("delete", [delete_through_another, prune_session])
def test_session_recreated_elsewhere_has_nothing_of_the_old_one(serve, open_shared, delete):
    one, other = serve(store=open_shared()), serve(store=open_shared())
    one.http.post("/sessions", json={"id": "s", "metadata": {"of": "the first"}, "sampling": {"temperature": 0.7}})
    first = other.post()
    delete(one)
    one.http.post("/sessions", json={"id": "s", "sampling": {"temperature": 0.2}})
    assert [other.post(json=continuation_of(first)).status_code for _ in range(2)] == [410, 200]
    [trace] = one.store.by_session("s")
    assert (trace.parent_id, trace.sampling["temperature"]) == (None, 0.2)
    assert other.http.get("/sessions/s").json()["metadata"] == {}


def test_reopening_a_session_deleted_elsewhere_keeps_nothing(serve, open_shared):
    one, other = serve(store=open_shared()), serve(store=open_shared())
    other.http.post("/sessions", json={"id": "s", "sampling": {"temperature": 0.7}})
    first = other.post()
    delete_through_another(one)
    other.http.post("/sessions", json={"id": "s"})
    assert other.post(json=continuation_of(first)).status_code == 200
    [trace] = one.store.by_session("s")
    assert (trace.parent_id, trace.sampling["temperature"]) == (None, 1.0)


def test_first_call_after_an_undetected_deletion_is_rejected(serve, open_shared):
    one, other = serve(store=open_shared()), serve(store=open_shared())
    first = other.post()
    delete_through_another(one)
    refused = other.post(json=continuation_of(first))
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_deleted")
    assert one.store.session("s") is None
    assert other.post(json=continuation_of(first)).status_code == 200


def test_calls_of_other_sessions_in_the_same_commit_are_kept(serve, open_shared):
    engine = HeldEngine(["hello"])
    one, other = serve(store=open_shared()), serve(engine, store=open_shared())
    for name in "abcd":
        other.http.post("/sessions", json={"id": name})
    with ThreadPoolExecutor(4) as agents:
        under_way = {name: agents.submit(other.post, f"/sessions/{name}/v1/chat/completions") for name in "abcd"}
        deadline = time.monotonic() + 60
        while engine.num_calls < 4:
            assert time.monotonic() < deadline, "the engine received no call"
            time.sleep(0.005)
        one.http.delete("/sessions/b")
        engine.go.set()
        answers = {name: answer.result(60).status_code for name, answer in under_way.items()}
    assert answers == {"a": 200, "b": 410, "c": 200, "d": 200}
    assert {info.id: info.num_traces for info in one.store.sessions()} == {"a": 1, "c": 1, "d": 1}


def test_id_of_a_session_deleted_elsewhere_grants_no_access(serve, open_shared):
    config = GatewayConfig(api_key="secret", session_ids_admit=True, shutdown_timeout_s=1.0)
    one, other = (serve(store=open_shared(), config=config) for _ in range(2))
    key = {"authorization": "Bearer secret"}
    made = one.http.post("/sessions", headers=key, json={}).json()
    path = f"/sessions/{made['id']}/v1/chat/completions"
    own = {"authorization": f"Bearer {made['api_key']}"}
    assert [other.post(path, headers=headers).status_code for headers in ({}, own)] == [200, 200]
    assert one.http.delete(f"/sessions/{made['id']}", headers=key).status_code == 200
    assert [other.post(path, headers=headers).status_code for headers in ({}, {}, own)] == [410, 401, 401]
    again = one.http.post("/sessions", json={"id": made["id"]}, headers=key).json()
    assert other.http.post("/v1/chat/completions", json={"messages": []}, headers=own).status_code == 401
    assert again["api_key"] != made["api_key"]


def test_evicted_session_is_read_with_answers_of_other_gateways(serve, open_shared, monkeypatch):
    monkeypatch.setattr("rllm.gateway.sessions._ALWAYS_IN_MEMORY", 0)
    config = GatewayConfig(session_memory_gb=1e-9, shutdown_timeout_s=1.0)
    one, other = (serve(ScriptedEngine(["one", "two", "three"]), store=open_shared(), config=config) for _ in range(2))
    one.http.post("/sessions", json={"id": "s", "sampling": {"temperature": 0.7}})
    asked = HI
    for gateway in (one, other, one):
        answer = gateway.post(json=asked).json()["choices"][0]["message"]
        asked = {**HI, "messages": [*asked["messages"], answer, {"role": "user", "content": "on"}]}
    first, second, third = one.store.by_session("s")
    assert [second.parent_id, third.parent_id] == [first.id, second.id]
    assert {trace.sampling["temperature"] for trace in (first, second, third)} == {0.7}
