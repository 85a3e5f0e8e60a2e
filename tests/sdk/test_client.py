from __future__ import annotations

import asyncio
import gc
import json
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from urllib.parse import unquote

import openai
import pytest
from pydantic import BaseModel

from rllm.errors import ConfigError, RLLMError
from rllm.sdk import get_chat_client, get_chat_client_async, recording, session
from rllm.sdk.context import Session

from .conftest import ModelServer


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_clients_are_real_openai_clients(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url, api_key="EMPTY") as client:
        assert isinstance(client, openai.OpenAI)
        answer = client.chat.completions.create(model="m", messages=user("hello"))
    assert answer.choices[0].message.content == "hello"
    assert isinstance(get_chat_client_async(api_key="x"), openai.AsyncOpenAI)


def test_calls_outside_of_sessions_are_not_stamped(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client:
        client.chat.completions.create(model="m", messages=user("hello"))
    assert not [name for name in server.received[0].headers if name.startswith("x-rllm")]


def test_call_is_stamped_and_recorded(server: ModelServer) -> None:
    client = get_chat_client(base_url=server.base_url, api_key="k")  # made outside, used inside
    with client, session(agent="solver") as outer, session(turn=1) as inner:
        client.chat.completions.create(model="m", messages=user("hello"))
    headers = server.received[0].headers
    assert headers["x-rllm-session"] == outer.name
    stamped = json.loads(unquote(headers["x-rllm-metadata"]))
    assert stamped == {"agent": "solver", "turn": 1, "session_uids": [outer._uid, inner._uid]}
    (trace,) = inner.llm_calls
    assert outer.llm_calls == [trace]
    assert trace.id == "chatcmpl-hello"
    assert trace.session_id == outer.name
    assert trace.messages == user("hello")
    assert trace.response == {"role": "assistant", "content": "hello"}
    assert (trace.prompt_ids, trace.response_ids, trace.logprobs) == ([1, 2], [3], [-0.5])
    assert trace.metadata == stamped
    assert trace.error is None


def test_call_without_proxy_is_recorded_and_not_stamped(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url, use_proxy=False) as client, session() as sess:
        client.chat.completions.create(model="m", messages=user("hello"))
    assert not [name for name in server.received[0].headers if name.startswith("x-rllm")]
    assert [step.id for step in sess.steps] == ["chatcmpl-hello"]


def test_session_base_url_redirects_calls(server: ModelServer) -> None:
    nowhere = "http://127.0.0.1:9/some/prefix/v1"
    with get_chat_client(base_url=nowhere) as client, Session(name="a:b", base_url=f"{server.url}/sessions/a:b/v1"):
        client.chat.completions.create(model="m", messages=user("hello"), extra_query={"q": "1"})
        copy = client.with_options(max_retries=0)
    assert server.received[0].path == "/sessions/a:b/v1/chat/completions?q=1"
    assert server.received[0].headers["host"] == server.url.removeprefix("http://")
    assert str(copy.base_url) == f"{nowhere}/"
    copy.close()


@pytest.mark.parametrize("nests", [False, True])
def test_thread_that_outlives_its_rollout_cannot_make_calls(server: ModelServer, nests: bool) -> None:
    """Especially not to the server that the client would call by itself, with a key that costs money."""
    ended = threading.Event()
    raised: list[BaseException] = []

    def agent() -> None:
        ended.wait(60)
        with pytest.raises(RLLMError) as caught, session() if nests else nullcontext():
            client.chat.completions.create(model="m", messages=user("secret"))
        raised.append(caught.value)

    with get_chat_client(base_url=server.base_url, max_retries=0) as client:
        with Session(name="s", base_url=f"{server.url}/sessions/s/v1"):
            thread = threading.Thread(target=agent)
            thread.start()
        ended.set()
        thread.join()
        assert server.received == []
        assert "the rollout of this thread or task has ended" in str(raised[0])
        client.chat.completions.create(model="m", messages=user("hello"))
    assert len(server.received) == 1


def test_thread_that_outlives_its_rollout_may_start_another(server: ModelServer) -> None:
    ended = threading.Event()

    def agent() -> None:
        ended.wait(60)
        with Session(name="second", base_url=f"{server.url}/sessions/second/v1"):
            client.chat.completions.create(model="m", messages=user("hello"))

    with get_chat_client(base_url="http://127.0.0.1:9/v1", max_retries=0) as client:
        with Session(name="first", base_url=f"{server.url}/sessions/first/v1") as first:
            thread = threading.Thread(target=agent)
            thread.start()
        ended.set()
        thread.join()
    assert [call.path for call in server.received] == ["/sessions/second/v1/chat/completions"]
    assert first.num_begun == 0


def test_every_choice_is_recorded(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client, session() as sess:
        client.chat.completions.create(model="m", messages=user("hello"), n=3)
    assert [trace.id for trace in sess.llm_calls] == ["chatcmpl-hello", "chatcmpl-hello:1", "chatcmpl-hello:2"]


@pytest.mark.parametrize("compress", [False, True])
def test_streams_pass_unchanged_and_are_recorded(server: ModelServer, compress: bool) -> None:
    server.compress = compress
    with get_chat_client(base_url=server.base_url) as client, session() as sess:
        stream = client.chat.completions.create(model="m", messages=user("hello"), stream=True)
        assert len(sess) == 0
        assert [chunk.choices[0].delta.content for chunk in stream] == [*"hello", None]
        assert [trace.response for trace in sess.llm_calls] == [{"role": "assistant", "content": "hello"}]
        assert sess.llm_calls[0].finish_reason == "stop"


def test_abandoned_stream_is_recorded_up_to_that_point(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client, session() as sess:
        with client.chat.completions.create(model="m", messages=user("hello"), stream=True) as stream:
            next(iter(stream))
        assert [trace.id for trace in sess.llm_calls] == ["chatcmpl-hello"]


async def test_async_streams_are_recorded(server: ModelServer) -> None:
    async with get_chat_client_async(base_url=server.base_url) as client:
        with session() as sess:
            stream = await client.chat.completions.create(model="m", messages=user("hello"), stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream] == [*"hello", None]
        assert [trace.response["content"] for trace in sess.llm_calls] == ["hello"]


def test_all_call_styles_are_recorded(server: ModelServer) -> None:
    class Answer(BaseModel):
        x: int

    with get_chat_client(base_url=server.base_url, use_proxy=False) as client, session() as sess:
        client.chat.completions.with_raw_response.create(model="m", messages=user("raw"))
        with client.chat.completions.with_streaming_response.create(model="m", messages=user("streaming")) as response:
            response.parse()
        parsed = client.chat.completions.parse(model="m", messages=user('{"x": 1}'), response_format=Answer)
        client.with_options(timeout=60).copy(max_retries=0).chat.completions.create(model="m", messages=user("copy"))
        with client.chat.completions.stream(model="m", messages=user("helper")) as stream:
            stream.until_done()
    assert parsed.choices[0].message.parsed == Answer(x=1)
    assert [trace.response["content"] for trace in sess.llm_calls] == ["raw", "streaming", '{"x": 1}', "copy", "helper"]


def test_client_replaces_chat_completions_for_langchain(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client, session() as sess:
        assert client.create(model="m", messages=user("plain")).choices[0].message.content == "plain"
        raw = client.with_raw_response.create(model="m", messages=user("raw"))
        assert raw.parse().choices[0].message.content == "raw"
        assert client.with_raw_response.chat.completions is not None
    assert len(sess) == 2


async def test_async_client_replaces_chat_completions(server: ModelServer) -> None:
    async with get_chat_client_async(base_url=server.base_url) as client:
        with session() as sess:
            await client.create(model="m", messages=user("plain"))
            raw = await client.with_raw_response.create(model="m", messages=user("raw"))
            assert raw.parse().choices[0].message.content == "raw"
    assert len(sess) == 2


def test_failed_call_is_not_recorded_and_its_retry_is(server: ModelServer) -> None:
    server.errors = [500]
    with get_chat_client(base_url=server.base_url, max_retries=1) as client, session() as sess:
        client.chat.completions.create(model="m", messages=user("again"))
        server.errors = [400]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=user("refused"))
    assert [trace.response["content"] for trace in sess.llm_calls] == ["again"]


def test_redirected_call_is_one_call(server: ModelServer) -> None:
    server.redirect_to = "/there/chat/completions"
    with get_chat_client(base_url=server.base_url) as client, session() as sess:
        client.chat.completions.create(model="m", messages=user("hello"))
    assert len(sess) == 1
    assert len(server.received) == 2


async def test_concurrent_calls_keep_request_order_and_their_sessions(server: ModelServer) -> None:
    async def arrival_of(text: str) -> None:
        for _ in range(12_000):
            if any(item.body["messages"] == user(text) for item in server.received):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{text} never arrived")

    async with get_chat_client_async(base_url=server.base_url, max_retries=0) as client:

        async def agent(name: str) -> list[str]:
            with session(agent=name) as sess:
                calls = []
                for sleep, turn in ((0.2, 1), (0.0, 2)):  # the second answer arrives first
                    message = user(f"{name}{turn}")
                    create = client.chat.completions.create(model="m", messages=message, extra_body={"sleep": sleep})
                    calls.append(asyncio.ensure_future(create))
                    await arrival_of(f"{name}{turn}")
                await asyncio.gather(*calls)
            return [trace.response["content"] for trace in sess.llm_calls]

        names = [f"agent{number}" for number in range(8)]
        assert await asyncio.gather(*map(agent, names)) == [[f"{name}1", f"{name}2"] for name in names]


def test_calls_from_threads_belong_to_the_session(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client, session() as sess, ThreadPoolExecutor() as executor:
        jobs = [
            executor.submit(client.chat.completions.create, model="m", messages=user(str(number)))
            for number in range(3)
        ]
        for job in jobs:
            job.result()
    assert sorted(trace.response["content"] for trace in sess.llm_calls) == ["0", "1", "2"]


def test_unserializable_metadata_is_sent_as_text(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client:
        for value in ({1, 2}, {("a",): 1}, float("nan"), "naïve 日本 % 😀", "a\udcff 😀"):
            with session(x=value):
                client.chat.completions.create(model="m", messages=user("hello"))
    stamps = [json.loads(unquote(item.headers["x-rllm-metadata"])) for item in server.received]
    assert [stamp["x"] for stamp in stamps] == ["{1, 2}", "{('a',): 1}", "nan", "naïve 日本 % 😀", "a? 😀"]
    assert all(isinstance(stamp["session_uids"], list) for stamp in stamps), "calls are assigned by these ids"


def test_long_metadata_is_not_sent(server: ModelServer, caplog: pytest.LogCaptureFixture) -> None:
    recording._warn_of_long_metadata.cache_clear()
    with (
        caplog.at_level(logging.WARNING),
        get_chat_client(base_url=server.base_url) as client,
        session(big="x" * 50_000) as sess,
    ):
        client.chat.completions.create(model="m", messages=user("hello"))
        client.chat.completions.create(model="m", messages=user("hello"))
    assert "big" not in unquote(server.received[0].headers["x-rllm-metadata"])
    assert len(caplog.records) == 1
    assert sess.llm_calls[0].metadata["big"] == "x" * 50_000


def test_custom_http_client_is_tracked_once(server: ModelServer) -> None:
    with (
        openai.DefaultHttpxClient() as http,
        get_chat_client(base_url=server.base_url, http_client=http) as client,
        get_chat_client(base_url=server.base_url, http_client=http) as other,
        session() as sess,
    ):
        client.chat.completions.create(model="m", messages=user("one"))
        other.chat.completions.create(model="m", messages=user("two"))
        with openai.DefaultHttpxClient() as another:
            client.with_options(http_client=another).chat.completions.create(model="m", messages=user("three"))
    assert [trace.response["content"] for trace in sess.llm_calls] == ["one", "two", "three"]


def test_api_key_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert get_chat_client(base_url="http://127.0.0.1:9/v1").api_key == "EMPTY"
    for none in (None, ""):  # as from a variable that is not set
        assert get_chat_client(base_url="http://127.0.0.1:9/v1", api_key=none).api_key == "EMPTY"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert get_chat_client(base_url="http://127.0.0.1:9/v1").api_key == "sk-mine"


def test_other_providers_are_rejected() -> None:
    with pytest.raises(ConfigError, match="anthropic"):
        get_chat_client("anthropic")
    with pytest.raises(ValueError, match="openai"):
        get_chat_client_async("x")


def test_client_works_in_consecutive_event_loops(server: ModelServer) -> None:
    client = get_chat_client_async(base_url=server.base_url)
    hasty = client.with_options(timeout=50.0)

    async def ask() -> list[str | None]:
        with session() as sess:
            clients = (client, hasty, client.with_options(timeout=40.0), client)
            answers = [await one.chat.completions.create(model="m", messages=user("hello")) for one in clients]
        assert len(sess.llm_calls) == len(clients)
        return [answer.choices[0].message.content for answer in answers]

    for _ in range(3):
        assert asyncio.run(ask()) == ["hello"] * 4
    gc.collect()  # A connection left open would warn here, and warnings are errors.


def test_client_does_not_keep_closed_event_loops(server: ModelServer) -> None:
    client = get_chat_client_async(base_url=server.base_url)

    async def ask() -> weakref.ref[asyncio.AbstractEventLoop]:
        await client.chat.completions.create(model="m", messages=user("hello"))
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(ask()) for _ in range(3)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


def test_client_serves_several_event_loops_concurrently(server: ModelServer) -> None:
    client = get_chat_client_async(base_url=server.base_url)
    together = threading.Barrier(3)

    async def ask(text: str) -> list[str | None]:
        answers = []
        for _ in range(3):
            together.wait(60)
            answer = await client.chat.completions.create(model="m", messages=user(text))
            answers.append(answer.choices[0].message.content)
        return answers

    with ThreadPoolExecutor(3) as threads:
        texts = ["one", "two", "three"]
        assert list(threads.map(lambda text: asyncio.run(ask(text)), texts)) == [[text] * 3 for text in texts]


def test_clients_can_be_pickled(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-this-process")
    sent = [
        get_chat_client(base_url=server.base_url, max_retries=7),
        get_chat_client_async(base_url=server.base_url, max_retries=7),
        get_chat_client(base_url=server.base_url).with_options(max_retries=7, timeout=5.0),
    ]
    pickled = [pickle.dumps(client) for client in sent]
    assert b"sk-of-this-process" not in pickled[0] + pickled[1]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-other")
    arrived = [pickle.loads(client) for client in pickled]
    assert [type(client) for client in arrived] == [type(client) for client in sent]
    assert [client.max_retries for client in arrived] == [7, 7, 7]
    assert [client.api_key for client in arrived] == ["sk-of-the-other", "sk-of-the-other", "sk-of-this-process"]
    with session() as sess:
        arrived[0].chat.completions.create(model="m", messages=user("hello"))
    assert len(sess.llm_calls) == 1


def test_client_with_its_own_connections_cannot_be_pickled() -> None:
    http = openai.DefaultHttpxClient(verify=False)
    with get_chat_client(api_key="k", http_client=http) as client, pytest.raises(ConfigError, match="make the client"):
        pickle.dumps(client.with_options(timeout=5.0))
