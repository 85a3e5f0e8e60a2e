"""Clients that ask again because they could not wait: one generation, one trace, and the answer of the first for the second."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from anthropic import Anthropic
from anthropic import DefaultHttpxClient as AnthropicHttpxClient
from openai import DefaultHttpxClient, OpenAI

from rllm.gateway.errors import GatewayError
from rllm.gateway.retried import Attempt, Flights, attempt_of
from rllm.gateway.sessions import Session

from ..waiting import wait_for
from .held import HeldEngine

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES}
SESSION = Session("s")


@pytest.fixture(autouse=True)
def come_back_whenever_you_like(monkeypatch):
    """On a busy machine a client may take long to ask again."""
    monkeypatch.setattr("rllm.gateway.retried._MARGIN_S", 60.0)


def impatient(served, engine, departures, *, go_at, timeout=1.5, max_retries=2, kind=OpenAI):
    """A real client that gives up early, and the retry counts that it sent; its request number `go_at` is answered."""
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
def test_openais_client_that_retries_gets_the_answer_of_its_first_request(serve, departures, stream):
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
def test_a_second_retry_gets_it_too(serve, departures):
    engine = HeldEngine()
    served = serve(engine)
    client, counts = impatient(served, engine, departures, go_at=3)
    assert client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content == "hello"
    assert counts == ["0", "1", "2"]
    assert [trace.error for trace in served.store.by_session("s")] == [None]
    assert engine.num_calls == 1


def test_anthropics_client_likewise(serve, departures):
    engine = HeldEngine()
    served = serve(engine)
    client, counts = impatient(served, engine, departures, go_at=2, kind=Anthropic)
    answer = client.messages.create(model="m", messages=MESSAGES, max_tokens=20)
    assert answer.content[0].text == "hello"
    assert counts == ["0", "1"]
    assert len(served.store.by_session("s")) == engine.num_calls == 1


def test_an_answer_that_was_made_meanwhile_is_kept_for_the_retry(serve, departures):
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


def test_equal_requests_at_once_are_samples_and_their_retries_find_one_each(serve, departures):
    texts = iter("abc")
    engine = HeldEngine(lambda messages: next(texts))
    served = serve(engine)

    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "0.01"}
    again = {**headers, "x-stainless-retry-count": "1"}
    for _ in range(3):
        served.ask_and_leave(json=BODY, headers=headers)
    wait_for(lambda: len(departures) == 3)
    engine.go.set()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(served.post, json=BODY, headers=again) for _ in range(3)]
        answers = [answer.result(timeout=60).json() for answer in asked]
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"a", "b", "c"}
    assert {answer["id"] for answer in answers} == {trace.id for trace in served.store.by_session("s")}
    assert engine.num_calls == 3


def test_equal_requests_of_two_agents_are_not_taken_for_each_others_retries(serve, departures):
    engine = HeldEngine()
    served = serve(engine)

    def headers_of(agent, count):
        told = {"x-rllm-metadata": f'{{"agent":"{agent}"}}'}
        return {"x-stainless-retry-count": count, "x-stainless-read-timeout": "0.01", **told}

    for agent in ("first", "second"):
        served.ask_and_leave(json=BODY, headers=headers_of(agent, "0"))
    wait_for(lambda: len(departures) == 2)
    engine.go.set()
    answers = {
        served.post(json=BODY, headers=headers_of(agent, "1")).json()["id"]: agent for agent in ("second", "first")
    }
    assert {trace.id: trace.metadata["agent"] for trace in served.store.by_session("s")} == answers


def test_an_answer_that_its_client_may_have_missed_by_a_moment_is_kept_for_one_retry(serve):
    served = serve(["a", "b"], latency_s=0.05)
    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "0.05"}
    first = served.post(json=BODY, headers=headers).json()["id"]
    again, other = (
        served.post(json=BODY, headers={**headers, "x-stainless-retry-count": "1"}).json()["id"] for _ in range(2)
    )
    assert (again, len(served.store.by_session("s"))) == (first, 2)
    assert other != first


def test_a_request_that_does_not_say_that_it_is_a_retry_is_a_call_of_its_own(serve):
    served = serve(["a", "b"])
    for headers in ({}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}):
        served.post(json=BODY, headers=headers)
    assert len(served.store.by_session("s")) == 3


def test_a_client_that_leaves_for_good_cancels_its_call_at_once(serve):
    engine = HeldEngine()
    served = serve(engine)
    headers = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "600"}
    served.ask_and_leave(json=BODY, headers=headers)
    wait_for(lambda: engine.num_cancelled)
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert "disconnected" in trace.error


def test_a_client_that_does_not_come_back_cancels_its_call_in_the_end(serve, departures, monkeypatch):
    monkeypatch.setattr("rllm.gateway.retried._MARGIN_S", 0.0)
    engine = HeldEngine()
    served = serve(engine)
    client, _ = impatient(served, engine, departures, go_at=9, timeout=0.5, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="m", messages=MESSAGES)
    wait_for(lambda: engine.num_cancelled)
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert "disconnected" in trace.error


def test_an_idempotency_key_makes_requests_one_while_the_first_is_under_way_and_for_a_while_after(serve):
    engine = HeldEngine()
    served = serve(engine)
    key = {"idempotency-key": "k"}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(served.post, json=BODY, headers=key) for _ in range(2)]
        wait_for(lambda: engine.num_calls)
        threading.Timer(0.2, engine.go.set).start()
        ids = {answer.result(timeout=60).json()["id"] for answer in both}
    ids.add(served.post(json=BODY, headers=key).json()["id"])
    assert ids == {trace.id for trace in served.store.by_session("s")}
    other = served.post(json={**BODY, "messages": [{"role": "user", "content": "ho"}]}, headers=key)
    assert other.json()["id"] not in ids
    assert engine.num_calls == 2


def test_the_answer_of_a_session_that_was_deleted_is_not_given_to_a_later_one_of_its_name(serve):
    served = serve(["a", "b"])
    key = {"idempotency-key": "k"}
    first = served.post(json=BODY, headers=key).json()["id"]
    served.http.delete("/sessions/s")
    again = served.post(json=BODY, headers=key).json()["id"]
    assert again != first
    assert [trace.id for trace in served.store.by_session("s")] == [again]


# --- the rules, without HTTP ------------------------------------------------------------------------------------------


def test_only_what_can_be_told_apart_is_an_attempt():
    count = {b"x-stainless-retry-count": b"2", b"x-stainless-read-timeout": b"600"}
    attempt = attempt_of(count, SESSION, b"{}")
    assert (attempt.number, attempt.read_timeout_s, attempt.idempotent) == (2, 600.0, False)
    assert attempt.pause_s == 2.0 + 60.0
    assert attempt_of(count, None, b"{}") is None
    assert attempt_of({}, SESSION, b"{}") is None
    assert attempt_of({b"x-stainless-retry-count": b"x"}, SESSION, b"{}") is None
    assert attempt_of({b"idempotency-key": b"k"}, None, b"{}").idempotent
    assert attempt_of({**count, b"x-stainless-read-timeout": b"x"}, SESSION, b"{}").read_timeout_s is None


async def test_a_failure_is_told_to_who_waits_and_not_kept():
    flights, first = Flights(), Attempt(key=(SESSION, b"k", 1))
    waiting = []

    def fail():
        with flights.begin(first):
            waiting.append(flights.find(first).joined(first))
            raise GatewayError(502, "broken")

    with pytest.raises(GatewayError):
        fail()
    with pytest.raises(GatewayError, match="broken"):
        await waiting[0]
    assert flights.find(first) is None


async def test_a_call_that_is_given_up_is_joined_by_nobody_while_it_ends():
    flights, leaver = Flights(), Attempt(key=(SESSION, b"k", 1), read_timeout_s=600.0)
    with flights.begin(leaver) as flight:
        assert not flight.left(lambda: None)
        assert flights.find(leaver) is None


async def test_a_call_goes_on_for_as_long_as_somebody_comes_back():
    flights, key, cuts = Flights(), (SESSION, b"", 1), []
    hasty, patient = Attempt(key=key, number=1, read_timeout_s=0.0), Attempt(key=key, number=2, read_timeout_s=600.0)
    with flights.begin(Attempt(key=key, read_timeout_s=0.0)) as flight:
        assert flights.find(hasty) is None
        assert flight.left(lambda: cuts.append("cut"))
        for _ in range(2):
            assert flights.find(hasty) is flight
            flight.joined(hasty)
            assert flights.find(hasty) is None, "another retry has a call of its own"
            assert flight.left_by(hasty)
        flight.joined(patient)
        assert not flight.left_by(patient)
        assert (cuts, flights.find(hasty), flights._offered) == (["cut"], None, {})


async def test_each_who_leaves_has_the_whole_time_to_come_back(pass_time):
    flights, attempt, cuts = Flights(), Attempt(key=(SESSION, b"", 1), read_timeout_s=0.0), []
    with flights.begin(attempt) as flight:
        assert flight.left(lambda: cuts.append("cut"))
        pass_time(0.9 * attempt.pause_s)
        flight.joined(attempt)
        assert flight.left_by(attempt)
        for cut in ([], ["cut"]):
            pass_time(0.9 * attempt.pause_s)
            for _ in range(3):
                await asyncio.sleep(0)
            assert cuts == cut


async def test_answers_are_forgotten(monkeypatch):
    monkeypatch.setattr("rllm.gateway.retried._KEPT_S", 0.05)
    flights, attempt = Flights(), Attempt(key=(SESSION, b"k", 1))
    with flights.begin(attempt) as flight:
        flight.land(b"answer")
    assert await flights.find(attempt).joined(attempt) == b"answer"
    while flights.find(attempt) is not None:  # noqa: ASYNC110  (a timer's work has no event)
        await asyncio.sleep(0.01)
    assert flights.find(attempt) is None
    assert (flights._offered, flights._kept_bytes) == ({}, 0)


async def test_answers_are_not_kept_beyond_a_bound(monkeypatch):
    monkeypatch.setattr("rllm.gateway.retried._MAX_KEPT_BYTES", 10)
    flights = Flights()
    for number, size in enumerate((6, 6, 4)):
        with flights.begin(Attempt(key=(SESSION, b"k", number))) as flight:
            flight.land(b"x" * size)
    assert [key[2] for key in flights._offered] == [0, 2]
