from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm.compat.proxy_manager import ProxyManager, _Upstream
from rllm.errors import ConfigError, RLLMError
from rllm.sdk import get_chat_client, propagation, session
from rllm.sdk.context import Session
from rllm.store.sqlite import SqliteTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

NOWHERE = "http://127.0.0.1:9/v1"


def entry(name: str, model: str, **params: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, **params}}


def config(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"model_list": list(entries)}


@pytest.fixture
def upstream() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedEngine(["hello"])) as server:
        yield server


@pytest.mark.parametrize("asks_for_ids", [None, False])
def test_session_is_recorded_in_the_file(upstream: ScriptedServer, tmp_path: Path, asks_for_ids: bool | None) -> None:
    manager = ProxyManager(proxy_port=0, admin_token="my-shared-secret")
    served = config(entry("small", "hosted_vllm/org/big", api_base=upstream.base_url, api_key="k"))
    database = tmp_path / "new" / "traces.db"
    manager.start_proxy_subprocess(
        served,
        db_path=str(database),
        project="demo",
        sync_tracer=False,
        add_logprobs=True,
        add_return_token_ids=asks_for_ids,
    )
    try:
        url = manager.get_proxy_url(include_v1=True)
        assert url == f"{manager.get_proxy_url(include_v1=False)}/v1"
        with get_chat_client(base_url=url, api_key="EMPTY") as client, session() as sess:
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}])
        assert asyncio.run(manager.flush_tracer(timeout=60.0))
        with pytest.raises(RLLMError, match="runs already"):
            manager.start_proxy_subprocess(served)
    finally:
        manager.shutdown_proxy()
    manager.shutdown_proxy()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False, timeout=60)
    assert upstream.requests[0]["model"] == "org/big"
    store = SqliteTraceStore(database, read_only=True)
    (trace,) = store.by_session(sess.name)
    store.close()
    assert [trace.id] == [step.id for step in sess.steps]
    assert trace.response["content"] == "hello"
    assert bool(trace.response_ids) is (asks_for_ids is None)


def test_proxy_started_in_a_rollout_uses_the_operator_keys(
    upstream: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_GATEWAY_API_KEY", "secret")
    manager = ProxyManager(proxy_port=0)
    with propagation.installed(), Session(base_url=NOWHERE):
        manager.start_proxy_subprocess(config(entry("m", "m", api_base=upstream.base_url)), tmp_path / "traces.db")
    try:
        url = f"{manager.get_proxy_url()}/models"
        assert httpx.get(url, trust_env=False, timeout=60).status_code == 401
        secret = {"Authorization": "Bearer secret"}
        assert httpx.get(url, headers=secret, trust_env=False, timeout=60).status_code == 200
    finally:
        manager.shutdown_proxy()


@pytest.mark.slow
def test_proxy_stops_with_its_process(tmp_path: Path) -> None:
    program = f"""
from rllm.sdk.proxy import ProxyManager
manager = ProxyManager(proxy_port=0)
manager.start_proxy_subprocess({config(entry("m", "m", api_base=NOWHERE))}, {str(tmp_path / "t.db")!r})
print(manager.get_proxy_url())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(done.stdout.strip(), trust_env=False, timeout=60)


def test_proxy_that_cannot_listen_reports_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        manager = ProxyManager(proxy_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another port"):
            manager.start_proxy_subprocess(config(entry("m", "m", api_base=NOWHERE)), tmp_path / "t.db")


def test_url_is_known_before_startup() -> None:
    assert ProxyManager().get_proxy_url() == "http://127.0.0.1:4000/v1"


def test_api_base_defaults_to_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    given = _Upstream.of_config(config(entry("gpt-4o-mini", "gpt-4o-mini", api_key="given")))
    assert given == _Upstream(url="https://api.openai.com/v1", api_key="given")
    assert given.is_openai
    assert _Upstream.of_config(config(entry("m", "openai/m"))).api_key == "from-environment"


def test_models_of_one_server_keep_their_names() -> None:
    models = config(entry("a", "openai/a", api_base=NOWHERE), entry("b", "b", api_base=f"{NOWHERE}/"))
    assert _Upstream.of_config(models) == _Upstream(url=NOWHERE, api_key=None)
    assert not _Upstream.of_config(models).is_openai


def test_key_may_name_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    named = config(entry("m", "m", api_base=NOWHERE, api_key="os.environ/SERVER_KEY"))
    monkeypatch.setenv("SERVER_KEY", "secret")
    upstream = _Upstream.of_config(named)
    assert upstream.api_key == "secret"
    assert "secret" not in repr(upstream)
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="SERVER_KEY is not set"):
        _Upstream.of_config(named)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "no models"),
        (config({"model_name": "m"}), r"model_list\[0\].* lacks 'litellm_params'"),
        (config(entry("m", "anthropic/m")), "no api_base"),
        (config(entry("a", "a", api_base=NOWHERE), entry("b", "b", api_base="http://b")), "one upstream is served"),
        (config(entry("a", "a", api_base=NOWHERE), entry("b", "c", api_base=NOWHERE)), "server's own name"),
    ],
)
def test_unsupported_config_is_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyManager().start_proxy_subprocess(wrong)
