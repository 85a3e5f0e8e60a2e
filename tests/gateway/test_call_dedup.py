"""Clients that retry after a timeout: one generation, one trace, and the first answer for the retry."""

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import openai
import pytest
from anthropic import Anthropic
from anthropic import DefaultHttpxClient as AnthropicHttpxClient
from openai import DefaultHttpxClient, OpenAI

from rllm.gateway.call_dedup import InFlightCall, InFlightCalls, RetryKey, retry_key
from rllm.gateway.sessions import SessionState

from ..waiting import wait_for
from .held_engine import HeldEngine

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES}
SESSION = SessionState("s")


@pytest.fixture(autouse=True)
def allow_retries_at_any_time(monkeypatch):
    """On a busy machine a client may take long to retry."""
    monkeypatch.setattr("rllm.gateway.call_dedup._PAUSE_S", 60.0)


def impatient(served, engine, departures, *, go_at, timeout=1.5, max_retries=2, kind=OpenAI):
    """Run a real client that gives up early; return the retry counts that it sent. Its request number `go_at` is answered."""
    counts = []

    def see(request):
        wait_for(lambda: len(departures) == len(counts))
        counts.append(request.headers["x-stainless-retry-count"])
        if len(counts) == go_at:
            request.extensions["timeout"]["read"] = 60.0
            threading.Timer(0.2, engine.go.set).start()

    make_http, suffix = (DefaultHttpxClient, "") if kind is OpenAI else (AnthropicHttpxClient, "/v1")
    options = {
        "max_retries": max_retries,
        "timeout": timeout,
        "http_client": make_http(event_hooks={"request": [see]}, verify=False),
    }
    base_url = served.server.session_url("s").removesuffix(suffix)
    return served.stack.enter_context(kind(base_url=base_url, api_key="unused", **options)), counts


@pytest.mark.parametrize("stream", [False, True])
def test_retry_of_the_openai_client_gets_the_first_answer(serve, departures, stream):
    engine = HeldEngine()
    served = serve(engine)
    client, counts = impatient(served, engine, departures, go_at=2)
    answer = client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert text == "hello"
    assert counts == ["0", "1"]
    [trace] = served.store.by_session("s")
    assert trace.error is None
    assert (engine.num_calls, engine.num_cancelled) == (1, 0)


@pytest.mark.slow
def test_second_retry_gets_the_first_answer(serve, departures):
    engine = HeldEngine()
    served = serve(engine)
    client, counts = impatient(served, engine, departures, go_at=3)
    assert client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content == "hello"
    assert counts == ["0", "1", "2"]
    assert [trace.error for trace in served.store.by_session("s")] == [None]
    assert engine.num_calls == 1


def test_retry_of_the_anthropic_client_gets_the_first_answer(serve, departures):
    engine = HeldEngine()
    served = serve(engine)
    client, counts = impatient(served, engine, departures, go_at=2, kind=Anthropic)
    answer = client.messages.create(model="m", messages=MESSAGES, max_tokens=20)
    assert answer.content[0].text == "hello"
    assert counts == ["0", "1"]
    assert len(served.store.by_session("s")) == engine.num_calls == 1


def test_finished_answer_is_kept_for_the_retry(serve, departures):
    engine = HeldEngine()
    served = serve(engine)
    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "0.01"}
    served.ask_and_leave(json=BODY, headers=headers)
    wait_for(lambda: departures)
    engine.go.set()
    wait_for(lambda: served.store.by_session("s"))
    again = served.post(json=BODY, headers={**headers, "x-stainless-retry-count": "1"})
    [trace] = served.store.by_session("s")
    assert (again.json()["id"], engine.num_calls) == (trace.id, 1)


def test_equal_requests_of_two_agents_are_separate_calls(serve, departures):
    engine = HeldEngine()
    served = serve(engine)

    def headers_of(agent, count):
        found = {"x-rllm-metadata": f'{{"agent":"{agent}"}}'}
        return {"x-stainless-retry-count": count, "x-stainless-read-timeout": "0.01", **found}

    for agent in ("first", "second"):
        served.ask_and_leave(json=BODY, headers=headers_of(agent, "0"))
    wait_for(lambda: len(departures) == 2)
    engine.go.set()
    answers = {
        served.post(json=BODY, headers=headers_of(agent, "1")).json()["id"]: agent for agent in ("second", "first")
    }
    assert {trace.id: trace.metadata["agent"] for trace in served.store.by_session("s")} == answers


def test_undelivered_answer_is_kept_for_one_retry(serve):
    served = serve(["a", "b"], latency_s=0.05)
    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "0.05"}
    first = served.post(json=BODY, headers=headers).json()["id"]
    again, other = (
        served.post(json=BODY, headers={**headers, "x-stainless-retry-count": "1"}).json()["id"] for _ in range(2)
    )
    assert (again, len(served.store.by_session("s"))) == (first, 2)
    assert other != first


def test_request_that_is_not_a_retry_is_a_separate_call(serve):
    served = serve(["a", "b"])
    for headers in ({}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}):
        served.post(json=BODY, headers=headers)
    assert len(served.store.by_session("s")) == 3


def test_call_of_a_permanently_closed_client_is_cancelled_at_once(serve):
    engine = HeldEngine()
    served = serve(engine)
    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "600"}
    served.ask_and_leave(json=BODY, headers=headers)
    wait_for(lambda: engine.num_cancelled)
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert "disconnected" in trace.error


def test_call_without_a_retry_is_cancelled(serve, departures, monkeypatch):
    monkeypatch.setattr("rllm.gateway.call_dedup._PAUSE_S", 0.5)
    engine = HeldEngine()
    served = serve(engine)
    client, _ = impatient(served, engine, departures, go_at=9, timeout=0.5, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="m", messages=MESSAGES)
    wait_for(lambda: engine.num_cancelled)
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert "disconnected" in trace.error


def test_answer_of_a_deleted_session_is_not_given_to_its_successor(serve):
    served = serve(["a", "b"])
    first, again = ({"x-stainless-retry-count": count, "x-stainless-read-timeout": "0"} for count in "01")
    given = served.post(json=BODY, headers=first).json()["id"]
    served.http.delete("/sessions/s")
    other = served.post(json=BODY, headers=again).json()["id"]
    assert other != given
    assert [trace.id for trace in served.store.by_session("s")] == [other]


# --- the rules, without HTTP ------------------------------------------------------------------------------------------


def test_only_requests_with_a_session_have_a_retry_key():
    count = {b"x-stainless-retry-count": b"2", b"x-stainless-read-timeout": b"600"}
    attempt = retry_key(count, SESSION, b"{}")
    assert (attempt.is_retry, attempt.read_timeout_s) == (True, 600.0)
    assert retry_key(count, None, b"{}") is None
    assert retry_key({}, SESSION, b"{}") is None
    assert retry_key({b"x-stainless-retry-count": b"x"}, SESSION, b"{}") is None
    assert retry_key({**count, b"x-stainless-read-timeout": b"x"}, SESSION, b"{}") is None


async def test_call_whose_client_left_early_cannot_be_joined():
    calls, leaver = InFlightCalls(), RetryKey(key=(SESSION, 1), read_timeout_s=600.0)
    with InFlightCall() as call:
        assert not calls.offer(leaver, call)
        assert calls.join(RetryKey(key=(SESSION, 1), is_retry=True, read_timeout_s=600.0)) is None


async def test_call_continues_as_long_as_clients_retry():
    calls, key = InFlightCalls(), (SESSION, 1)
    hasty, patient = (
        RetryKey(key=key, is_retry=True, read_timeout_s=0.0),
        RetryKey(key=key, is_retry=True, read_timeout_s=600.0),
    )
    first = RetryKey(key=key, read_timeout_s=0.0)
    with InFlightCall() as call:
        assert calls.join(hasty) is None
        assert calls.offer(first, call)
        for _ in range(2):
            assert calls.join(hasty) is call
            assert calls.join(hasty) is None, "a second retry starts its own call"
            assert calls.offer(hasty, call)
        assert calls.join(hasty) is call
        assert not calls.offer(patient, call)


async def test_retry_fails_as_its_call_does():
    calls, request = InFlightCalls(), RetryKey(key=(SESSION, 1), is_retry=True, read_timeout_s=0.0)
    joined = []

    def fail():
        with InFlightCall() as call:
            assert calls.client_gone(request, call, lambda: None)
            joined.append(calls.join(request))
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    with pytest.raises(ValueError, match="broken"):
        await joined[0].answer


async def test_failed_call_is_freed_at_once():
    failed = []

    def fail():
        with InFlightCall() as call:
            failed.append(weakref.ref(call))
            raise ValueError("broken")

    gc.disable()  # a gateway's collector leaves cycles for minutes, and a call holds its whole request
    try:
        with suppress(ValueError):
            fail()
        assert failed[0]() is None
    finally:
        gc.enable()


async def test_each_client_has_the_whole_pause_for_its_retry(pass_time):
    calls, attempt, cuts = InFlightCalls(), RetryKey(key=(SESSION, 1), is_retry=True, read_timeout_s=0.0), []
    with InFlightCall() as call:
        call.cut = lambda: cuts.append("cut")
        assert calls.offer(attempt, call)
        pass_time(0.9 * 60.0)
        assert calls.join(attempt) is call
        assert calls.offer(attempt, call)
        for cut in ([], ["cut"]):
            pass_time(0.9 * 60.0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert cuts == cut
