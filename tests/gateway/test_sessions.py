import asyncio
import http.client
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import quote

import pytest

from rllm.capture import MessageDigests
from rllm.config.sampling import ImposedSampling
from rllm.errors import ConfigError, StoreError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import ABORTED, Gateway, ModelCall
from rllm.gateway.sessions import Sessions, SessionState
from rllm.gateway.upstream import HTTPUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.types import Trace

from .held_engine import HeldEngine
from .servers import RawServer
from .servers import http as http_answer

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1//chat/completions/"])
def test_path_names_the_session(serve, path):
    served = serve()
    assert served.post(f"/sessions/a{path}").headers["x-rllm-session"] == "a"
    assert len(served.store.by_session("a")) == 1


@pytest.mark.parametrize("path", [PLAIN, "/chat/completions"])
@pytest.mark.parametrize(
    "headers", [{"x-rllm-session": "a"}, {"authorization": "Bearer rllm-a"}, {"authorization": "bearer rllm-a"}]
)
def test_header_and_key_name_the_session(serve, path, headers):
    served = serve()
    assert served.post(path, headers=headers).headers["x-rllm-session"] == "a"
    assert len(served.store.by_session("a")) == 1


def test_path_and_header_override_the_key(serve):
    served = serve()
    key = {"authorization": "Bearer rllm-key"}
    assert served.post("/sessions/a/v1/chat/completions", headers=key).headers["x-rllm-session"] == "a"
    assert served.post(PLAIN, headers={**key, "x-rllm-session": "b"}).headers["x-rllm-session"] == "b"


def test_path_and_header_must_agree(serve):
    served = serve()
    path = "/sessions/a/v1/chat/completions"
    assert served.post(path, headers={"x-rllm-session": "a"}).status_code == 200
    refused = served.post(path, headers={"x-rllm-session": "b"})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "conflicting_session"
    assert served.engine.num_calls == 1
    _, trace = served.store.by_session("a")  # the URL's, which takes precedence
    assert (trace.error, trace.finish_reason) == (refused.json()["error"]["message"], "error")
    assert served.store.by_session("b") == []


def test_call_without_session_gets_a_new_one(serve):
    served = serve()
    first, second = (served.post(PLAIN, headers={"authorization": "Bearer sk-other"}) for _ in range(2))
    assert first.headers["x-rllm-session"] != second.headers["x-rllm-session"]
    [trace] = served.store.by_session(first.headers["x-rllm-session"])
    assert trace.id == first.json()["id"]


def test_session_id_may_contain_url_escapes(serve):
    served = serve()
    base_url = served.server.open_session("täsk 1:0".replace(" ", "+"))
    served.client(base_url=base_url).chat.completions.create(**HI)
    assert len(served.store.by_session("täsk+1:0")) == 1


@pytest.mark.parametrize("path", [PLAIN, "/sessions/t%C3%A4sk/v1/chat/completions"])
def test_header_names_a_session_like_the_url(serve, path):
    served = serve()
    answer = served.post(path, headers={"x-rllm-session": "täsk".encode()})
    assert answer.headers["x-rllm-session"] == "täsk"
    assert len(served.store.by_session("täsk")) == 1


def test_header_in_an_older_encoding_is_read(serve):
    served = serve()
    served.post(PLAIN, headers={"x-rllm-session": b"t\xe4sk"})
    assert len(served.store.by_session("täsk")) == 1


@pytest.mark.parametrize("session_id", ["a/b", "a b", "", "x" * 257, ".", "..", "a\ud800"])
def test_id_that_is_invalid_in_a_url_is_rejected(refusing, session_id):
    with pytest.raises(ConfigError, match="session id"):
        refusing.server.open_session(session_id)


@pytest.mark.parametrize("name", ["%FF", "%2E%2E", ".%2e", "a%ED%A0%80"])
def test_ambiguous_names_are_rejected(refusing, name):
    address = refusing.server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(*address, timeout=60)  # httpx resolves dots itself
    connection.request("POST", f"/sessions/{name}/v1/chat/completions", json.dumps(HI))
    assert connection.getresponse().status == 400
    connection.close()


def test_metadata_of_a_call_is_stored_with_its_trace(serve):
    served = serve()
    metadata = {"agent": "söl ver", "step": 3}
    served.post(headers={"x-rllm-metadata": quote(json.dumps(metadata))})
    assert served.store.by_session("s")[0].metadata == metadata


@pytest.mark.parametrize("value", ["{", "[1]", "%7B%22a%22", "3"])
def test_malformed_metadata_is_rejected(refusing, value):
    refused = refusing.post(headers={"x-rllm-metadata": value})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_metadata"


def test_unlistable_metadata_is_rejected(refusing):
    refused = refusing.post(headers={"x-rllm-metadata": f'{{"x":{"[" * 300}{"]" * 300}}}'})
    assert refused.status_code == 400
    assert "200 levels" in refused.json()["error"]["message"]


def test_session_is_created_read_listed_and_deleted_over_http(serve):
    served = serve()
    created = served.http.post("/sessions", json={"id": "a", "metadata": {"task": 7}, "sampling": {"temperature": 0.7}})
    assert created.json() == {"id": "a", "base_url": f"{served.server.url}/sessions/a/v1"}
    served.client(base_url=created.json()["base_url"]).chat.completions.create(**HI)
    shown = served.http.get("/sessions/a").json()
    assert (shown["num_traces"], shown["metadata"], shown["sampling"]) == (1, {"task": 7}, {"temperature": 0.7})
    assert [session["id"] for session in served.http.get("/sessions").json()["sessions"]] == ["a"]
    [trace] = served.http.get("/sessions/a/traces").json()["traces"]
    promised = "id session_id model prompt_ids response_ids logprobs finish_reason weight_version messages response"
    assert set(promised.split()) <= trace.keys()
    assert served.http.delete("/sessions/a").json()["num_traces"] == 1
    assert served.http.get("/sessions/a").status_code == 404


def test_session_without_id_gets_one(serve):
    served = serve()
    created = served.http.post("/sessions").json()
    assert created["id"] in created["base_url"]
    assert served.http.get(f"/sessions/{created['id']}/traces").json() == {"traces": []}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"id": 3}', "id=3"),
        ("[]", "a JSON array: send an object with id, metadata, sampling"),
        ("{", "not valid JSON"),
        ('{"name": "x"}', "'name'"),
        ('{"sampling": {"temprature": 1}}', "temprature"),
        ('{"sampling": {"temperature": -1}}', "temperature=-1"),
        ('{"id": "a/b"}', "a/b"),
        ('{"metadata": {"x": %s}}' % ("[" * 300 + "]" * 300), "levels"),
    ],
)
def test_malformed_session_is_rejected(refusing, body, named):
    refused = refusing.http.post("/sessions", content=body)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/sessions/nobody", "/sessions/nobody/traces"])
def test_unknown_session_is_an_openai_error(refusing, path):
    missing = refusing.http.get(path)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "session_not_found"
    assert "nobody" in missing.json()["error"]["message"]


def test_traces_are_in_call_order(serve):
    served = serve(lambda messages: messages[-1]["content"])
    for number in range(5):
        served.post(json={**HI, "messages": [{"role": "user", "content": str(number)}]})
    traces = served.http.get("/sessions/s/traces").json()["traces"]
    assert [trace["response"]["content"] for trace in traces] == ["0", "1", "2", "3", "4"]


def test_session_sampling_overrides_the_request_and_both_are_recorded(serve, upstream):
    served = serve(["a long answer"], upstream=upstream)
    base_url = served.server.open_session("s", sampling={"temperature": 0.7, "max_tokens": 3})
    client = served.client(base_url=base_url)
    for limit in ({"max_tokens": 100}, {"max_completion_tokens": 100}):
        answer = client.chat.completions.create(**HI, temperature=0.1, **limit)
        assert answer.usage.completion_tokens == 3
    for trace in served.store.by_session("s"):
        assert (trace.sampling["temperature"], trace.sampling["max_tokens"]) == (0.7, 3)
        assert trace.requested_sampling["temperature"] == 0.1


def test_fixed_sampling_and_parents_survive_a_restart_of_the_gateway(serve):
    store, engine = MemoryTraceStore(), ScriptedEngine(["one", "two"])
    served = serve(engine, store=store)
    served.server.open_session("s", sampling={"temperature": 0.7})
    first = served.post().json()
    served.server.stop()
    messages = [*HI["messages"], first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    restarted = serve(engine, store=store)
    restarted.post(json={"messages": messages})
    trace = store.by_session("s")[-1]
    assert trace.sampling["temperature"] == 0.7
    assert trace.parent_id == first["id"]


async def test_token_count_uses_the_session_sampling():
    answer = {"choices": [{"index": 0, "message": {"content": ""}}], "usage": {"prompt_tokens": 3}}
    sampling = {"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 5, "max_completion_tokens": 9, "n": 2}
    async with RawServer(http_answer(200, answer)) as server:
        upstream = HTTPUpstream(server.url)
        call = ModelCall(
            asked={**HI, "min_tokens": 2}, session=SessionState("s", sampling=ImposedSampling(sampling)), id="c"
        )
        assert await Gateway(MemoryTraceStore(), upstream).count_tokens(call) == 3
        await upstream.close()
    [sent] = server.requests
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["max_tokens"] == 1
    assert not {"min_tokens", "max_completion_tokens", "n"} & sent.keys()


async def test_interrupted_answer_is_not_continued_after_a_restart():
    store, user = MemoryTraceStore(), {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "The answ"}
    tokens = {"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-0.1, -0.2]}
    shared = {"session_id": "s", "model": "m", "messages": [user], "response": answer, **tokens}
    store.add([Trace(id="whole", call_id="whole", **shared)])
    store.add([Trace(id="cut", call_id="cut", finish_reason="abort", error=ABORTED, **shared)])
    session = await Sessions(store).get("s")
    assert session.conversations.missing_trace(MessageDigests.of([user, answer, user], None)) == "whole"


def test_reopening_adds_metadata_and_replaces_sampling(serve):
    served = serve()
    served.server.open_session("s", metadata={"a": 1}, sampling={"temperature": 0.7})
    served.server.open_session("s", metadata={"sampling": "the user's own"})
    served.post()
    served.server.open_session("s", sampling={})
    served.post()
    shown = served.http.get("/sessions/s").json()
    assert shown["metadata"] == {"a": 1, "sampling": "the user's own"}
    assert [trace.sampling["temperature"] for trace in served.store.by_session("s")] == [0.7, 1.0]


def seeds_of(served, session_id):
    return [trace.sampling["seed"] for trace in served.store.by_session(session_id)]


def test_session_seed_gives_each_call_its_own_seed(serve, upstream):
    served = serve(upstream=upstream)
    other = {"model": "m", "messages": [{"role": "user", "content": "ho"}]}
    for session_id, calls in {"a": [HI, HI, other], "b": [other, HI, HI]}.items():
        served.server.open_session(session_id, sampling={"seed": 7})
        for call in calls:
            served.post(f"/sessions/{session_id}/v1/chat/completions", json={**call, "seed": 1})
    first, second, third = seeds_of(served, "a")
    assert len({first, second, third, 1, 7}) == 5
    assert seeds_of(served, "b") == [third, first, second]


def test_session_seeds_continue_after_a_restart_of_the_gateway(serve):
    whole, store = serve(), MemoryTraceStore()
    whole.server.open_session("s", sampling={"seed": 7})
    for _ in range(3):
        whole.post(json={**HI, "n": 2})
    first = serve(store=store)
    first.server.open_session("s", sampling={"seed": 7})
    first.post(json={**HI, "n": 2})
    first.server.stop()
    restarted = serve(store=store)
    for _ in range(2):
        restarted.post(json={**HI, "n": 2})
    assert seeds_of(restarted, "s") == seeds_of(whole, "s")


def test_seed_of_the_agent_is_kept_if_none_is_imposed(serve):
    served = serve()
    served.server.open_session("s", sampling={"temperature": 0.5})
    served.post(json={**HI, "seed": 3})
    assert seeds_of(served, "s") == [3]


def test_traces_are_in_the_order_of_call_starts(serve):
    served = serve()
    served.post("/sessions/a/v1/chat/completions")
    [trace] = served.store.by_session("a")
    ended_first = replace(trace, id="second", started_at=trace.started_at + 2)
    ended_last = replace(trace, id="first", started_at=trace.started_at + 1)
    served.store.add([ended_first, ended_last]).result()
    listed = served.http.get("/sessions/a/traces").json()["traces"]
    assert [item["id"] for item in listed] == [trace.id, "first", "second"]


@pytest.mark.parametrize("given", ["limit=-1", "limit=x", "offset=-1", "limit=1.5", f"offset={'9' * 5000}", "limit="])
def test_invalid_page_number_is_rejected(refusing, given):
    refused = refusing.http.get(f"/sessions?{given}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == given.partition("=")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_call_of_a_deleted_session_adds_nothing_to_its_successor(serve, stream):
    engine = HeldEngine(["abcdefgh"])
    served = serve(engine)
    served.server.open_session("a", metadata={"of": "the first"})
    with ThreadPoolExecutor(1) as agent:
        under_way = agent.submit(served.post, "/sessions/a/v1/chat/completions", {**HI, "stream": stream})
        while engine.num_calls == 0:
            time.sleep(0.005)
        served.http.delete("/sessions/a")
        engine.go.set()
        answer = under_way.result(60)
    assert "session_deleted" in answer.text
    assert stream or answer.status_code == 410
    assert served.store.session("a") is None
    assert served.post("/sessions/a/v1/chat/completions").status_code == 200
    [trace] = served.store.by_session("a")
    assert trace.parent_id is None
    assert served.http.get("/sessions/a").json()["metadata"] == {}


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True])
def test_invalid_number_of_answers_is_not_imposed(refusing, n):
    refused = refusing.http.post("/sessions", json={"id": "many", "sampling": {"n": n}})
    assert refused.status_code == 400
    assert "use a whole number from 1 to 128" in refused.json()["error"]["message"]


class SlowlyDeleted(MemoryTraceStore):
    """Store that deletes at once, and confirms deletions one by one when the test allows it."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)

    def delete(self, session_id):
        num_traces = super().delete(session_id)
        self.go.acquire(timeout=60)
        return num_traces


async def test_session_reopened_between_two_deletions_stays_open():
    store = SlowlyDeleted()
    sessions = Sessions(store)
    sessions.open("a", metadata=None, sampling=None).result(60)
    deletions = {asyncio.create_task(sessions.delete("a")) for _ in range(2)}
    store.go.release()
    _, deletions = await asyncio.wait(deletions, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    later = await sessions.get("a")
    store.go.release()
    await asyncio.gather(*deletions)
    assert await sessions.get("a") is later


class Undeletable(MemoryTraceStore):
    """Store that deletes nothing, and fails when the test allows it."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def delete(self, session_id):
        self.asked.set()
        self.go.wait(60)
        raise StoreError("the disk is gone")


@pytest.mark.parametrize("stream", [False, True])
def test_session_continues_if_the_store_fails_to_delete_it(serve, stream):
    engine, store = HeldEngine(["abcdefgh"]), Undeletable()
    served = serve(engine, store=store)
    served.server.open_session("a", sampling={"temperature": 0.5})
    with ThreadPoolExecutor(2) as agents:
        under_way = agents.submit(served.post, "/sessions/a/v1/chat/completions", {**HI, "stream": stream})
        while engine.num_calls == 0:
            time.sleep(0.005)
        deleting = agents.submit(served.http.delete, "/sessions/a")
        assert store.asked.wait(60)
        assert served.post("/sessions/a/v1/chat/completions").status_code == 410, "the session is being deleted"
        store.go.set()
        refused = deleting.result(60)
        assert (refused.status_code, refused.json()["error"]["message"]) == (500, "the store failed: the disk is gone")
        engine.go.set()
        answer = under_way.result(60)
    assert answer.status_code == 200
    assert "session_deleted" not in answer.text
    assert served.post("/sessions/a/v1/chat/completions").status_code == 200
    assert [trace.sampling["temperature"] for trace in store.by_session("a")] == [0.5, 0.5]


async def test_session_is_read_after_a_failed_deletion():
    store = Undeletable()
    Sessions(store).open("a", metadata=None, sampling={"temperature": 0.5}).result(60)
    store.go.set()
    sessions = Sessions(store)
    with pytest.raises(StoreError):
        await sessions.delete("a")
    assert (await sessions.get("a")).sampling.parameters == {"temperature": 0.5}


class SlowToRead(MemoryTraceStore):
    """Store that signals when traces are read, and returns them when the test allows it."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()
        self.num_reads = 0

    def by_session(self, session_id):
        self.num_reads += 1
        self.asked.set()
        assert self.go.wait(60)
        return super().by_session(session_id)


async def test_session_deleted_while_being_read_is_read_again():
    store = SlowToRead()
    store.open_session("a", {"of": "a"}).result(60)
    sessions = Sessions(store)
    reading = asyncio.create_task(sessions.get("a"))
    await asyncio.to_thread(store.asked.wait, 60)
    await sessions.delete("a")
    store.go.set()
    await reading
    assert store.num_reads <= 2


async def test_evicted_session_is_known_during_its_call(monkeypatch):
    monkeypatch.setattr("rllm.gateway.sessions._MAX_IN_MEMORY", 1)
    sessions = Sessions(MemoryTraceStore())
    under_way = await sessions.get("a")
    await sessions.get("b")
    assert await sessions.get("a") is under_way
    await sessions.get("b")
    await sessions.delete("a")
    assert under_way.deleted
    assert not (await sessions.get("a")).deleted


def trace_in(session_id, number, num_tokens):
    tokens = {"prompt_ids": [1] * num_tokens, "response_ids": [2], "logprobs": [-0.1]}
    shared = {"session_id": session_id, "model": "m", "messages": HI["messages"], "response": {"role": "assistant"}}
    return Trace(id=f"{session_id}{number}", call_id=f"{session_id}{number}", **shared, **tokens)


async def test_large_sessions_are_evicted_least_recently_used_first():
    store = MemoryTraceStore()
    sessions = Sessions(store, memory_gb=1e-4)

    async def call(session_id, num_tokens):
        session = await sessions.get(session_id)
        trace = trace_in(session_id, 0, num_tokens)
        store.add([trace], session=session.ref).result(60)
        answer = MessageDigests.of(trace.messages, None)
        session.conversations.add(session.conversations.prepare(answer, trace))
        session.conversations.provide_tokens(MessageDigests.of([*HI["messages"], trace.response], None), trace)
        sessions.update_size(session)

    for session_id in ("a", "b"):
        await call(session_id, 10_000)
    under_way = await sessions.get("b")
    assert [sessions.knows(session_id) for session_id in "ab"] == [True, True]
    await call("c", 10_000)
    assert [sessions.knows(session_id) for session_id in "abc"] == [False, True, True]
    await call("d", 30_000)
    assert [sessions.knows(session_id) for session_id in "abcd"] == [False, True, False, True], (
        "the newest session stays"
    )
    assert await sessions.get("b") is under_way, "a session in use stays"
    again = MessageDigests.of([*HI["messages"], {"role": "assistant"}], None)
    assert (await sessions.get("a")).conversations.missing_trace(again) == "a0"
    await call("e", 10_000)
    known = [sessions.knows(session_id) for session_id in "ade"]
    assert known == [True, False, True], "evicted sessions no longer count"


async def test_session_is_cached_until_the_store_can_return_it(monkeypatch):
    store, writes = MemoryTraceStore(), [Future()]
    monkeypatch.setattr(store, "open_session", lambda *_, **__: writes[0])
    sessions = Sessions(store, memory_gb=1e-9)
    sessions.open("a", metadata=None, sampling={"temperature": 0.5})
    large = await sessions.get("large")
    large.conversations.num_bytes = 100
    sessions.update_size(large)
    assert (await sessions.get("a")).sampling.parameters == {"temperature": 0.5}
    writes.pop().set_result(None)
    assert not sessions.knows("a")


@pytest.mark.parametrize("memory_gb", [0, -1, float("nan")])
def test_zero_memory_for_sessions_is_rejected(memory_gb):
    with pytest.raises(ConfigError, match="session_memory_gb"):
        GatewayConfig(session_memory_gb=memory_gb)


async def test_recreated_session_has_nothing_of_the_deleted_one(monkeypatch):
    monkeypatch.setattr("rllm.gateway.sessions._MAX_IN_MEMORY", 1)
    store = MemoryTraceStore()
    sessions = Sessions(store)
    sessions.open("a", metadata=None, sampling=None).result(60)
    under_way = await sessions.get("a")
    await sessions.get("b")
    store.delete("a")
    sessions.open("a", metadata=None, sampling=None).result(60)
    assert await sessions.get("a") is not under_way
    assert under_way.deleted


def test_clients_cannot_set_internal_metadata(serve):
    served = serve()
    refused = served.post(headers={"x-rllm-metadata": '{"rllm.side_call": true}'})
    assert refused.status_code == 400
    assert "'rllm.side_call' begins with 'rllm.'" in refused.json()["error"]["message"]
    refused = served.http.post("/sessions", json={"id": "s", "metadata": {"rllm.sampling": {"temperature": -1}}})
    assert refused.status_code == 400
    assert "'rllm.sampling'" in refused.json()["error"]["message"]
    assert served.engine.num_calls == 0


def test_session_ids_grant_access_only_to_calls_and_models(serve):
    served = serve(["four"], config=GatewayConfig(api_key="secret", session_ids_admit=True, shutdown_timeout_s=1.0))
    name = "5" * 32
    served.server.open_session(name)
    assert served.post(f"/sessions/{name}/v1/responses", json={"model": "m", "input": "hi"}).is_success
    assert served.http.get(f"/sessions/{name}/v1/models").status_code == 200
    for method, path in (("GET", f"/sessions/{name}/traces"), ("DELETE", f"/sessions/{name}"), ("GET", "/v1/models")):
        assert served.http.request(method, path).status_code == 401
    assert served.http.get("/sessions/never-begun/v1/models").status_code == 401
    operator = {"authorization": "Bearer secret"}
    assert served.http.delete(f"/sessions/{name}", headers=operator).status_code == 200


def test_reward_may_be_set_and_replaced_after_the_calls(serve):
    served = serve()
    served.post("/sessions/a/v1/chat/completions")
    assert served.post("/sessions/a/reward", {"reward": 1}).json() == {"id": "a", "reward": 1.0}
    assert served.store.session("a").metadata["reward"] == 1.0
    assert served.post("/sessions/a/reward", {"reward": 0.25}).status_code == 200
    assert served.store.session("a").metadata["reward"] == 0.25
    assert len(served.store.by_session("a")) == 1


@pytest.mark.parametrize("body", [{}, {"reward": "good"}, {"reward": True}, {"rewards": 1.0}])
def test_reward_that_is_not_a_number_is_rejected(serve, body):
    served = serve()
    served.post("/sessions/a/v1/chat/completions")
    refused = served.post("/sessions/a/reward", body)
    assert (refused.status_code, "reward" in refused.json()["error"]["message"]) == (400, True)
    assert "reward" not in served.store.session("a").metadata


def test_only_the_operator_may_reward_an_existing_session(serve):
    served = serve(config=GatewayConfig(api_key="secret"))
    key = {"authorization": "Bearer secret"}
    opened = served.post("/sessions", {"id": "a"}, headers=key).json()
    own = {"authorization": f"Bearer {opened['api_key']}"}
    assert served.post("/sessions/a/reward", {"reward": 1.0}, headers=own).status_code in (401, 403)
    assert served.post("/sessions/b/reward", {"reward": 1.0}, headers=key).status_code == 404
    assert served.post("/sessions/a/reward", {"reward": 1.0}, headers=key).status_code == 200
