"""Several replicas as one upstream: routing of calls, retries, and waiting."""

import asyncio
import contextlib
import itertools

import pytest

from rllm.errors import ConfigError, InferenceError
from rllm.gateway.config import PoolConfig
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream import HTTPUpstream, UpstreamCall, UpstreamPool
from rllm.gateway.upstream.base import UPSTREAM_KEY, Route
from rllm.gateway.upstream.pool import preference

from .servers import ANSWER, CUT, GOOD, STREAMED, RawServer, event_stream, http, refusal

DEADLINE_S = 60


@contextlib.asynccontextmanager
async def pool_of(*servers, connect=HTTPUpstream, **config):
    """Start servers, and yield a pool of them."""
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        pool = UpstreamPool([server.url for server in servers], connect, PoolConfig(**config))
        stack.push_async_callback(pool.close)
        async with asyncio.timeout(DEADLINE_S):
            yield pool


def preferred(pool, session):
    return min((replica.address for replica in pool.replicas), key=lambda address: preference(session, address))


async def ask(pool, session="", *, stream=False, route=None):
    """Send one call of a session, by default of one that prefers the first replica; return its route."""
    first, session_ids = pool.replicas[0].address, map(str, itertools.count())
    if session == "":
        session = next(one for one in session_ids if preferred(pool, one) == first)
    route = route or Route(session)
    request = {"messages": [{"role": "user", "content": session or ""}], "stream": stream}
    call = UpstreamCall(id="c", request=request, route=route)
    if stream:
        async with contextlib.aclosing(pool.stream(call)) as batches:
            assert [batch async for batch in batches]
    else:
        assert (await pool.complete(call))["choices"] == ANSWER["choices"]
    return route


def sessions_of(server):
    return {request["messages"][0]["content"] for request in server.requests}


async def until(true):
    while not true():  # noqa: ASYNC110  (what changes is a server's, which knows no events)
        await asyncio.sleep(0.005)


async def test_session_stays_with_one_replica_and_sessions_are_spread():
    one, two = RawServer(), RawServer()
    async with pool_of(one, two) as pool:
        for _ in range(3):
            for number in range(30):
                await ask(pool, f"session-{number}")
    assert sessions_of(one) & sessions_of(two) == set()
    assert min(len(sessions_of(one)), len(sessions_of(two))) >= 5


async def test_calls_without_session_go_to_the_least_loaded_replica():
    one, two = RawServer(), RawServer()
    one.hold.clear()
    async with pool_of(one, two) as pool:
        slow = asyncio.create_task(ask(pool, None))
        await until(lambda: one.requests)
        for _ in range(4):
            await ask(pool, None)
        assert (len(one.requests), len(two.requests)) == (1, 4)
        one.hold.set()
        await slow


async def test_session_moves_from_a_lost_replica_and_the_trace_records_it():
    one, two = RawServer(), RawServer()
    async with pool_of(one, two) as pool:
        assert (await ask(pool)).notes() == {UPSTREAM_KEY: {"replica": one.url}}
        await one.stop()
        moved = await ask(pool)
        assert moved.replica == two.url
        [retry] = moved.retries
        assert (retry["replica"], retry["status"]) == (one.url, 502)
        assert moved.notes()[UPSTREAM_KEY]["retries"] == [retry]
        assert moved.timings()["retry_s"] == retry["lost_s"]
        assert not (await ask(pool)).retries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_rejected_call_is_sent_to_another_replica(status, stream):
    one, two = RawServer(refusal(status)), RawServer(STREAMED if stream else GOOD)
    async with pool_of(one, two) as pool:
        route = await ask(pool, stream=stream)
    assert (len(one.requests), len(two.requests)) == (1, 1)
    assert [(retry["fault"], retry["status"]) for retry in route.retries] == [("refused", status)]


async def test_single_replica_is_retried_after_its_stated_delay():
    server = RawServer(refusal(429, "retry-after: 1"), GOOD)
    async with pool_of(server) as pool:
        route = await ask(pool)
    assert len(server.requests) == 2
    assert route.queue_s > 0.9
    assert route.timings().keys() == {"queue_s", "retry_s"}


async def test_retry_after_of_a_day_is_ignored_while_calls_are_held():
    async with pool_of(RawServer(refusal(429, "retry-after: 86400")), hold_timeout_s=0.2) as pool:
        with pytest.raises(UpstreamError) as refused:
            await ask(pool)
        [replica] = pool.replicas
        assert not replica.up
        assert replica.refused(refused.value, 10.0) < PoolConfig().hold_timeout_s


@pytest.mark.parametrize(
    "answer",
    [
        http(400, {"error": {"message": "no such model"}}),
        http(500, {"error": {"message": "the engine has died"}}),
        http(429, {"error": {"message": "pay first", "code": "insufficient_quota"}}),
        http(200, b"<html>"),
    ],
)
async def test_error_that_any_replica_would_return_is_not_retried(answer):
    one, two = RawServer(answer), RawServer(answer)
    async with pool_of(one, two) as pool:
        with pytest.raises(UpstreamError):
            await ask(pool)
    assert len(one.requests) + len(two.requests) == 1


async def test_interrupted_answer_is_retried_a_limited_number_of_times():
    one, two = RawServer(CUT), RawServer(GOOD)
    async with pool_of(one, two) as pool:
        assert [retry["fault"] for retry in (await ask(pool)).retries] == ["broke_off"]
    one, two = RawServer(CUT), RawServer(CUT)
    async with pool_of(one, two) as pool:
        with pytest.raises(UpstreamError, match="broke off"):
            await ask(pool)
    assert len(one.requests) + len(two.requests) == 3


async def test_stream_is_never_retried_after_its_first_event():
    piece = {"choices": [{"index": 0, "delta": {"content": "h"}, "finish_reason": None}]}
    one, two = RawServer(event_stream(piece, end=False)), RawServer(STREAMED)
    async with pool_of(one, two) as pool:
        with pytest.raises(UpstreamError, match="broke off"):
            await ask(pool, stream=True)
        assert two.requests == []


async def test_stream_interrupted_before_its_first_event_is_retried():
    one, two = RawServer(event_stream(end=False)), RawServer(STREAMED)
    async with pool_of(one, two) as pool:
        assert (await ask(pool, stream=True)).replica == two.url


async def test_retry_prefers_another_replica():
    async with pool_of(RawServer(), RawServer()) as pool:
        route = Route("s")
        first = await pool.acquire(route)
        route.retries.append({"replica": first.address})
        other = await pool.acquire(route)
        assert other is not first
        other.failed(ConnectionError("gone"))
        assert await pool.acquire(route) is first


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_held_while_no_replica_answers(stream):
    server = RawServer(STREAMED if stream else GOOD)
    async with pool_of(server, check_interval_s=0.05) as pool:
        await server.stop()
        calls = [asyncio.create_task(ask(pool, f"{number}", stream=stream)) for number in range(5)]
        await until(lambda: pool.num_waiting == 5)
        with pytest.raises(InferenceError, match="cannot be reached"):
            await pool.check()
        await server.start()
        routes = await asyncio.gather(*calls)
        await pool.check()
    assert all(route.queue_s > 0 for route in routes)
    assert len(server.requests) == 5


async def test_held_calls_continue_when_a_probe_succeeds(monkeypatch):
    monkeypatch.setattr("rllm.gateway.upstream.pool._FIRST_PAUSE_S", DEADLINE_S)
    server = RawServer()
    async with pool_of(server, check_interval_s=DEADLINE_S) as pool:
        await server.stop()
        held = asyncio.create_task(ask(pool))
        await until(lambda: pool.num_waiting)
        with pytest.raises(InferenceError, match="cannot be reached"):
            await pool.check()
        await server.start()
        await pool.check()
        await asyncio.gather(held, ask(pool))
    assert len(server.requests) == 2


async def test_calls_are_not_held_indefinitely():
    server = RawServer()
    async with pool_of(server, hold_timeout_s=0.2) as pool:
        await server.stop()
        with pytest.raises(UpstreamError, match="cannot be reached") as refused:
            await ask(pool)
        assert (refused.value.status_code, refused.value.retry_after_s) == (503, 10.0)
        assert pool.num_waiting == 0


async def test_pause_holds_calls_longer_than_an_outage():
    server = RawServer()
    async with pool_of(server, hold_timeout_s=1.0, check_interval_s=0.05) as pool:
        await server.stop()
        call = asyncio.create_task(ask(pool))
        await until(lambda: pool.num_waiting)
        pool.pause()
        await asyncio.sleep(1.2)
        await server.start()
        pool.resume()
        assert (await call).queue_s > 1.2


async def test_total_timeout_covers_waiting_and_answering():
    server = RawServer()
    server.hold.clear()
    async with pool_of(server, total_timeout_s=0.3) as pool:
        calls = [asyncio.create_task(ask(pool)) for _ in range(2)]
        late = await asyncio.gather(*calls, return_exceptions=True)
    assert [error.status_code for error in late] == [504, 504]


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_call_cancels_it_at_its_replica(stream):
    server = RawServer()
    server.hold.clear()
    async with pool_of(server) as pool:
        call = asyncio.create_task(ask(pool, stream=stream))
        await until(lambda: server.requests)
        call.cancel()
        await until(lambda: server.num_broken_off)
        assert pool.in_flight == 0


async def test_paused_calls_get_the_new_weights():
    server = RawServer()
    server.hold.clear()
    async with pool_of(server) as pool:
        pool.publish(6)
        under_way = asyncio.create_task(ask(pool))
        await until(lambda: server.requests)
        pool.pause()
        held = asyncio.create_task(ask(pool))
        await until(lambda: pool.num_waiting)
        assert pool.in_flight == 1
        server.hold.set()
        await until(lambda: not pool.in_flight)
        with pytest.raises(InferenceError, match="paused"):
            await pool.check()
        assert len(server.requests) == 1
        pool.publish(7)
        pool.resume()
        assert ((await under_way).weight_version, (await held).weight_version) == (6, 7)


@pytest.mark.parametrize("stream", [False, True])
async def test_weight_change_during_an_answer_is_recorded(stream):
    server = RawServer(STREAMED if stream else GOOD)
    server.hold.clear()
    async with pool_of(server) as pool:
        pool.publish(1)
        call = asyncio.create_task(ask(pool, stream=stream))
        await until(lambda: server.requests)
        pool.publish(2)
        server.hold.set()
        route = await call
    assert (route.weight_version, route.notes()) == (1, {UPSTREAM_KEY: {"updated_to": 2}})


class SlowToCheck(HTTPUpstream):
    """Server that answers calls, but not health checks."""

    num_checks = 0
    """Checks that have finished."""

    async def check(self):
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_checks += 1


async def test_failed_probes_do_not_mark_a_replica_as_down(monkeypatch):
    monkeypatch.setattr("rllm.gateway.upstream.pool._CHECK_TIMEOUT_S", 0.02)
    async with pool_of(RawServer(), connect=SlowToCheck, check_interval_s=DEADLINE_S) as pool:
        probes = await asyncio.gather(*(pool.check() for _ in range(4)), return_exceptions=True)
        assert all("did not answer within" in str(problem) for problem in probes)
        await ask(pool)
        assert not pool.all_down


@pytest.mark.parametrize("status", [401, 404])
async def test_replica_without_model_list_recovers(status, caplog):
    server = RawServer()
    server.models = refusal(status)
    async with pool_of(server, check_interval_s=0.02) as pool:
        await server.stop()
        call = asyncio.create_task(ask(pool))
        await until(lambda: pool.num_waiting == 1)
        await server.start()
        await call
    assert len(server.requests) == 1
    assert "is down, and gets no calls until it answers" in caplog.text
    assert "answers again" in caplog.text  # each logged outage has its recovery


async def test_models_come_from_any_replica_that_lists_them():
    one, two = RawServer(), RawServer()
    async with pool_of(one, two) as pool:
        await one.stop()
        assert await pool.models() == [{"id": "m"}]


@pytest.mark.parametrize(
    ("urls", "named"),
    [([], "at least one"), (["http://h:1", "http://h:1/v1"], "given twice"), (["http://h:1", "h:2"], "base URL")],
)
def test_invalid_urls_are_rejected(urls, named):
    with pytest.raises(ConfigError, match=named):
        UpstreamPool(urls)


def test_invalid_settings_are_rejected():
    with pytest.raises(ConfigError, match="hold_timeout_s"):
        PoolConfig(hold_timeout_s=0)


def test_undisturbed_call_adds_nothing_to_its_trace():
    assert (Route("s").timings(), Route("s").notes()) == ({}, {})
