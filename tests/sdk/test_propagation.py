"""Calls of unmodified clients belong to the session in which they are made."""

from __future__ import annotations

import json
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import aiohttp
import certifi
import httpx
import httpx2
import openai
import pytest

from rllm.errors import ConfigError
from rllm.gateway.identity import session_key
from rllm.sdk import environment, get_chat_client, propagation
from rllm.sdk.context import Session, session
from rllm.sdk.propagation import hints_for
from rllm.sdk.recording import read_stamp
from rllm.sdk.variables import gateway_variables

from .conftest import ModelServer

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def ask(client: openai.OpenAI, text: str) -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def test_plain_client_is_stamped_and_recorded(server: ModelServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="k") as client, propagation.installed():
        ask(client, "outside")
        with Session(name="rollout", base_url=server.base_url) as sess:
            ask(client, "inside")
    outside, inside = server.received
    assert "x-rllm-session" not in outside.headers
    assert inside.headers["x-rllm-session"] == "rollout"
    assert [trace.response["content"] for trace in sess.llm_calls] == ["inside"]


async def test_plain_async_client_is_recorded_streamed_or_not(server: ModelServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        with propagation.installed(), Session(base_url=server.base_url) as sess:
            messages: Any = BODY["messages"]
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
    assert [trace.response["content"] for trace in sess.llm_calls] == ["hello"]


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_both_generations_of_httpx_are_recorded(server: ModelServer, library: Any) -> None:
    with propagation.installed(), library.Client() as client, Session(base_url=server.base_url) as sess:
        client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert len(sess) == 1


async def test_aiohttp_is_stamped(server: ModelServer) -> None:
    with propagation.installed(), Session(name="rollout", base_url=server.base_url):
        async with aiohttp.ClientSession() as client:
            headers = {"X-Mine": "1", "x-rllm-session": "forged"}
            url = f"{server.base_url}/chat/completions"
            async with client.post(url, json=BODY, headers=headers) as response:
                assert response.status == 200
            async with client.post(url, json=BODY, headers=list(headers.items())):
                pass
            async with client.post(url, json=BODY):
                pass
    assert [item.headers["x-rllm-session"] for item in server.received] == ["rollout"] * 3
    assert [item.headers.get("x-mine") for item in server.received] == ["1", "1", None]


def test_other_servers_get_no_stamp_and_are_remembered(server: ModelServer) -> None:
    elsewhere = Session(base_url="http://127.0.0.1:9/v1")
    with openai.OpenAI(base_url=server.base_url, api_key="k") as client, propagation.installed(), elsewhere:
        ask(client, "hello")
    assert not [name for name in server.received[0].headers if name.startswith("x-rllm")]
    assert len(elsewhere) == 0
    assert elsewhere.elsewhere == [f"{server.base_url}/chat/completions"]


def test_loopback_names_are_one_server(server: ModelServer) -> None:
    by_name = server.base_url.replace("127.0.0.1", "localhost")
    with propagation.installed(), httpx.Client(timeout=60) as client, Session(base_url=by_name) as sess:
        client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert len(sess) == 1


def test_tracked_client_is_not_recorded_twice(server: ModelServer) -> None:
    with propagation.installed(), Session(base_url=server.base_url) as sess:
        for use_proxy in (True, False):
            with get_chat_client(base_url=server.base_url, use_proxy=use_proxy) as client:
                ask(client, "hello")
    assert len(sess) == 2
    stamps = [read_stamp(item.headers["x-rllm-metadata"]) for item in server.received]
    assert [stamp["session_uids"] for stamp in stamps] == [[sess._uid]] * 2


def test_tracked_client_of_another_server_is_redirected(server: ModelServer) -> None:
    client = get_chat_client(base_url="http://127.0.0.1:9/v1")
    with propagation.installed(), client, Session(base_url=server.base_url) as sess:
        ask(client, "hello")
    assert len(sess) == 1
    assert sess.elsewhere == []


def test_client_shared_by_many_threads_keeps_sessions_apart(server: ModelServer) -> None:
    def rollout(number: int) -> list[Any]:
        with Session(name=f"rollout-{number}", base_url=server.base_url) as sess:
            worker = threading.Thread(target=ask, args=(client, f"{number} in a thread"))
            worker.start()
            worker.join()
            ask(client, f"{number} itself")
        return [trace.response["content"] for trace in sess.llm_calls]

    client = openai.OpenAI(base_url=server.base_url, api_key="k")
    with client, propagation.installed(), ThreadPoolExecutor(16) as executor:
        calls = list(executor.map(rollout, range(32)))
    assert calls == [[f"{number} in a thread", f"{number} itself"] for number in range(32)]
    for item in server.received:
        number = item.body["messages"][0]["content"].split()[0]
        assert item.headers["x-rllm-session"] == f"rollout-{number}"


def test_patches_are_counted_and_removed() -> None:
    before = httpx.Client.send, httpx2.AsyncClient.send, aiohttp.ClientSession._request
    with propagation.installed(), propagation.installed():
        assert httpx.Client.send is not before[0]
    assert (httpx.Client.send, httpx2.AsyncClient.send, aiohttp.ClientSession._request) == before


def test_later_patch_by_other_code_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    before = httpx.Client.send

    def theirs(self: Any, request: Any, **options: Any) -> Any:
        raise NotImplementedError

    with propagation.installed():
        httpx.Client.send = theirs  # type: ignore[method-assign]
    try:
        assert httpx.Client.send is theirs
    finally:
        httpx.Client.send = before  # type: ignore[method-assign]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_environment_has_the_variables_of_all_clients(suffix: str) -> None:
    variables = environment("http://127.0.0.1:8000/sessions/a%3Ab" + suffix)
    assert variables["OPENAI_BASE_URL"] == variables["OPENAI_API_BASE"] == "http://127.0.0.1:8000/sessions/a%3Ab/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000/sessions/a%3Ab"
    assert variables["OPENAI_API_KEY"] == "rllm-a:b"
    assert "127.0.0.1" in variables["NO_PROXY"].split(",")


@pytest.mark.parametrize(
    ("inherited", "named"),
    [
        ({}, "gw"),
        ({"NO_PROXY": "a, b"}, "a,b,gw"),
        ({"no_proxy": "a"}, "a,gw"),
        ({"NO_PROXY": "a,gw", "no_proxy": "b"}, "a,gw,b"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_hosts_without_proxy_stay_without_proxy(inherited: dict[str, str], named: str) -> None:
    variables = gateway_variables("http://gw:1", inherited=inherited)
    assert (variables["NO_PROXY"], variables["no_proxy"]) == (named, named)


def test_gateway_key_is_in_the_environment() -> None:
    assert environment("http://gw:1", api_key="secret")["OPENAI_API_KEY"] == "secret"
    assert environment("http://gw:1/sessions/s", api_key="secret")["ANTHROPIC_API_KEY"] == "secret:rllm-s"
    assert environment("http://gw:1")["OPENAI_API_KEY"] == "rllm"
    assert environment("http://gw:1/behind", api_key="secret")["OPENAI_API_KEY"] == "secret"


def test_non_ascii_session_is_named_only_by_the_url() -> None:
    variables = environment("http://gw:1/sessions/t%C3%A4sk", api_key="secret")
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "secret"
    assert environment("http://gw:1/sessions/t%C3%A4sk")["OPENAI_API_KEY"] == "rllm"


def test_session_key_is_passed_unchanged() -> None:
    bound = session_key("secret", "s", 1)
    assert environment("http://gw:1/sessions/s", api_key=bound)["OPENAI_API_KEY"] == bound


def test_frameworks_are_quiet_unless_configured_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP", raising=False)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "0")
    variables = environment("http://gw:1")
    assert variables["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert "OPENAI_AGENTS_DISABLE_TRACING" not in variables


def test_user_token_is_not_sent_to_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    assert "ANTHROPIC_AUTH_TOKEN" not in environment("http://gw:1"), (
        "a second credential is sent only if the user has one"
    )
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "mine")
    assert environment("http://gw:1/sessions/s")["ANTHROPIC_AUTH_TOKEN"] == "rllm-s"


def test_environment_defaults_to_the_current_session() -> None:
    with Session(base_url="http://127.0.0.1:1/sessions/s/v1"), session():
        assert environment()["OPENAI_BASE_URL"] == "http://127.0.0.1:1/sessions/s/v1"
    with pytest.raises(ConfigError, match="pass the gateway's URL"):
        environment()
    with pytest.raises(ConfigError, match="ftp://x"):
        environment("ftp://x")


def test_environment_records_its_position_in_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-team: red")
    with Session(base_url="http://127.0.0.1:1/sessions/s/v1") as outer, session(agent="solver") as inner:
        team, header = environment()["OPENAI_CUSTOM_HEADERS"].splitlines()
    name, _, value = header.partition(": ")
    assert (team, name) == ("x-team: red", "x-rllm-metadata")
    assert json.loads(unquote(value)) == {"agent": "solver", "session_uids": [outer._uid, inner._uid]}
    assert "OPENAI_CUSTOM_HEADERS" not in environment("http://127.0.0.1:1"), (
        "a URL alone does not name a session of this process"
    )


@pytest.mark.parametrize("stamp", ["", "%7B", "[1]", '{"session_uids":"x"}'])
def test_foreign_inherited_metadata_is_ignored(server: ModelServer, stamp: str) -> None:
    headers = {"x-rllm-metadata": stamp}
    with get_chat_client(base_url=server.base_url, default_headers=headers) as client, session(turn=1) as sess:
        ask(client, "hello")
    stamped = json.loads(unquote(server.received[0].headers["x-rllm-metadata"]))
    assert stamped == {"turn": 1, "session_uids": [sess._uid]}


def context_of(transport: Any) -> ssl.SSLContext:
    context: ssl.SSLContext = transport._pool._ssl_context
    return context


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_clients_of_rollouts_share_one_tls_context(library: Any) -> None:
    with propagation.installed():
        transports = [library.HTTPTransport(), library.AsyncHTTPTransport(), library.Client()._transport]
        contexts = {context_of(transport) for transport in transports}
    assert len(contexts) == 1
    assert contexts.pop().verify_mode == ssl.CERT_REQUIRED
    assert context_of(library.HTTPTransport()) not in {context_of(transport) for transport in transports}


def test_clients_with_custom_tls_settings_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ssl.create_default_context()
    with propagation.installed():
        shared = context_of(httpx.HTTPTransport())
        assert context_of(httpx.HTTPTransport(verify=own)) is own
        assert context_of(httpx.HTTPTransport(verify=False)).verify_mode == ssl.CERT_NONE
        assert context_of(httpx.HTTPTransport(trust_env=False)) is not shared
        monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
        assert context_of(httpx.HTTPTransport()) is not shared


def test_programs_are_identified_by_the_name_of_their_file() -> None:
    (hint,) = hints_for(modules=(), programs=["/usr/local/bin/codex", "python"])
    assert "CODEX_HOME" in hint


def test_hint_names_the_top_framework_first() -> None:
    hints = hints_for(modules={"litellm": None, "crewai": None, "json": None})
    assert [hint.partition(" ")[0].rstrip(":") for hint in hints] == ["CrewAI", "LiteLLM"]


def test_process_without_framework_gets_no_hint() -> None:
    assert hints_for(modules={"agents": None}) == [], "projects often name their own package so"
