import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from anthropic import Anthropic, RateLimitError

from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.limits import CallLimits, TokenBucket
from rllm.gateway.sessions import Sessions
from rllm.store.memory import MemoryTraceStore


def limited(serve, **limits):
    return serve(config=GatewayConfig(shutdown_timeout_s=1, **limits))


def test_a_bucket_fills_as_time_goes_by():
    bucket = TokenBucket(per_minute=6, now=0.0)
    for _ in range(6):
        assert bucket.wait_s(0.0) == 0.0
        bucket.take()
    assert bucket.wait_s(0.0) == 10.0
    assert bucket.wait_s(5.0) == 5.0
    assert bucket.wait_s(10.0) == 0.0
    bucket.take()
    for _ in range(6):
        assert bucket.wait_s(1000.0) == 0.0
        bucket.take()
    assert bucket.wait_s(1000.0) == 10.0, "what is not used in a minute is gone"


def test_less_than_a_call_a_minute_is_a_limit_too():
    bucket = TokenBucket(per_minute=0.5, now=0.0)
    assert bucket.wait_s(0.0) == 0.0
    bucket.take()
    assert bucket.wait_s(0.0) == 120.0
    assert bucket.wait_s(1000.0) == 0.0
    bucket.take()
    assert bucket.wait_s(1000.0) == 120.0


def test_calls_above_the_limit_are_told_when_to_come_again(serve):
    served = limited(serve, calls_per_minute=2)
    assert [served.post(f"/sessions/{name}/v1/chat/completions").status_code for name in "abc"] == [200, 200, 429]
    refused = served.post()
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert served.engine.num_calls == 2
    assert served.http.get("/sessions/a/traces").status_code == 200, "only calls are counted"


def test_each_session_has_a_limit_of_its_own(serve):
    served = limited(serve, session_calls_per_minute=1)
    paths = [f"/sessions/{name}/v1/chat/completions" for name in "abab"] + ["/v1/chat/completions"] * 2
    assert [served.post(path).status_code for path in paths] == [200, 200, 429, 429, 200, 429]


def test_a_call_that_its_session_may_not_make_takes_nothing_from_the_others(serve):
    served = limited(serve, session_calls_per_minute=1, calls_per_minute=2)
    paths = [f"/sessions/{name}/v1/chat/completions" for name in "aaab"]
    assert [served.post(path).status_code for path in paths] == [200, 429, 429, 200]


def test_anthropics_client_understands(serve):
    served = limited(serve, calls_per_minute=1)
    client = Anthropic(base_url=f"{served.server.url}/sessions/s", api_key="k", max_retries=0)
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with client:
        client.messages.create(**asked)
        with pytest.raises(RateLimitError) as refused:
            client.messages.create(**asked)
    assert refused.value.body["error"]["type"] == "rate_limit_error"


def test_no_more_sessions_begin_than_are_allowed(serve):
    served = limited(serve, max_sessions=2)
    assert served.http.post("/sessions", json={"id": "a"}).status_code == 200
    assert served.post("/sessions/b/v1/chat/completions").status_code == 200
    refused = [
        served.post("/sessions/c/v1/chat/completions"),
        served.post("/v1/chat/completions"),
        served.http.post("/sessions", json={"id": "c"}),
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(429, "too_many_sessions")}
    assert all("retry-after" in answer.headers for answer in refused)
    assert served.post("/sessions/a/v1/chat/completions").status_code == 200, "those that are there go on"


def test_a_session_that_is_deleted_makes_room(serve, monkeypatch):
    monkeypatch.setattr("rllm.gateway.limits._COUNT_EVERY_S", 0.0)
    served = limited(serve, max_sessions=1)
    assert served.post("/sessions/a/v1/chat/completions").status_code == 200
    assert served.post("/sessions/b/v1/chat/completions").status_code == 429
    served.http.delete("/sessions/a")
    assert served.post("/sessions/b/v1/chat/completions").status_code == 200


async def admitted(admissions):
    """How many of these, which come at once, are let in."""
    ended = await asyncio.gather(*admissions, return_exceptions=True)
    assert all(error is None or error.status == 429 for error in ended)
    return ended.count(None)


def limits_over(store, **limits):
    return CallLimits(GatewayConfig(**limits), Sessions(store), store)


async def test_calls_that_come_at_once_are_counted_each():
    limits = limits_over(MemoryTraceStore(), calls_per_minute=3, session_calls_per_minute=2, max_sessions=100)
    assert await admitted(limits.admit_call("s") for _ in range(5)) == 2
    assert await admitted(limits.admit_call(f"s-{k}") for k in range(5)) == 1


async def test_sessions_that_begin_at_once_are_counted_each():
    store = MemoryTraceStore()
    for name in "ab":
        store.open_session(name, {})
    for most, num_admitted in ((2, 0), (3, 1)):
        limits = limits_over(store, max_sessions=most)
        assert await admitted(limits.admit_session(f"s-{k}") for k in range(3)) == num_admitted


async def test_however_many_sessions_there_are_they_are_counted():
    store = MemoryTraceStore()
    for k in range(150):
        store.open_session(f"old-{k}", {})
    limits = limits_over(store, max_sessions=151)
    assert await admitted(limits.admit_session(f"s-{k}") for k in range(3)) == 1


def test_a_session_whose_first_calls_come_at_once_begins_once(serve):
    served = limited(serve, max_sessions=2)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(served.post, "/sessions/a/v1/chat/completions") for _ in range(4)]
    assert [call.result().status_code for call in calls] == [200] * 4
    assert served.post("/sessions/b/v1/chat/completions").status_code == 200


@pytest.mark.parametrize("name", ["calls_per_minute", "session_calls_per_minute", "max_sessions"])
def test_a_limit_is_above_zero(name):
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        GatewayConfig(**{name: -1})
