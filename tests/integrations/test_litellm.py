"""Routing of a call, without a LiteLLM proxy; `test_litellm_proxy.py` starts one."""

import logging
import sys

import httpx
import pytest

import rllm.integrations.litellm as bridge
from rllm.errors import ConfigError, MissingDependencyError
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer


def proxied(headers=(), **call):
    """Return the keyword arguments of a call that arrived at a LiteLLM proxy with these headers."""
    shown = {name: value for name, value in dict(headers).items() if name.lower() != "authorization"}
    return {
        "proxy_server_request": {"headers": shown},
        "secret_fields": {"raw_headers": dict(headers)},
        "metadata": {},
        **call,
    }


@pytest.mark.parametrize(
    ("call", "session_id"),
    [
        (proxied(), None),
        (proxied({"Authorization": "Bearer sk-1"}), None),
        (proxied({"Authorization": "Bearer rllm-a"}), "a"),
        (proxied({"authorization": "Bearer sk-1:rllm-a"}), "a"),
        (proxied({"authorization": "Bearer rllm-a"}, metadata={"session_id": "b"}), "b"),
        (proxied(litellm_session_id="c"), "c"),
        (proxied(litellm_metadata={"rllm_session": "e"}), "e"),
        (proxied({"X-Rllm-Session": "f"}, metadata={"rllm_session": "e"}), "f"),
        (proxied(metadata={"rllm_session": 5}), "5"),
        *((proxied(metadata={"session_id": others}), None) for others in ("a/b", "my session", "..", "x" * 257, 12)),
        (proxied({"authorization": "Bearer rllm-a"}, litellm_session_id="my session"), "a"),
    ],
)
def test_session_is_named_by_header_metadata_or_key(call, session_id):
    assert bridge.session_of(call, bridge.headers_of(call)) == session_id


async def test_call_is_redirected_through_a_gateway_with_the_upstream_key():
    store = MemoryTraceStore()
    with ScriptedServer(ScriptedEngine(["hello"])) as upstream:
        detours = bridge.Detours(store)
        call = proxied(
            {"x-rllm-session": "a-b", "traceparent": "00-1-2-01", "cookie": "c"},
            model="hosted_vllm/m",
            api_base=upstream.base_url,
            api_key="upstream's",
            extra_headers={"x-own": "1"},
        )
        led, again = await detours.redirect(call), await detours.redirect({**call, "extra_headers": None})
        assert await detours.redirect(led) is led
        headers = {"authorization": f"Bearer {led['api_key']}", **led["extra_headers"]}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(base_url=led["api_base"], timeout=60, verify=False) as client:
            answer = await client.post("chat/completions", json=body, headers=headers)
            refused = await client.post("chat/completions", json=body, headers={"authorization": "Bearer upstream's"})
        [trace] = store.by_session("a-b")
        detours.close()
    assert again["api_base"] == led["api_base"]
    assert led["extra_headers"] == {"x-own": "1", "traceparent": "00-1-2-01"}
    assert refused.status_code == 401
    assert trace.id == answer.json()["id"]
    assert [len(trace.response_ids), trace.error] == [6, None]


async def test_non_vllm_models_are_skipped_and_logged_once(caplog):
    detours = bridge.Detours(MemoryTraceStore())
    call = proxied(model="openai/gpt", api_base="http://127.0.0.1:1/v1")
    with caplog.at_level(logging.WARNING):
        assert await detours.redirect(call) is call
        assert await detours.redirect(call) is call
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "calls of openai/gpt are not captured"
    ]


async def test_invalid_address_is_an_error():
    detours = bridge.Detours(MemoryTraceStore())
    with pytest.raises(ConfigError, match="'nowhere'"):
        await detours.redirect(proxied(model="openai/m", api_base="nowhere", model_info={"rllm": True}))


async def test_invalid_session_id_is_an_error():
    detours = bridge.Detours(MemoryTraceStore())
    call = proxied({"x-rllm-session": "a/b"}, model="hosted_vllm/m", api_base="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="session id 'a/b'"):
        await detours.redirect(call)
    detours.close()


def test_missing_litellm_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm.integrations.custom_logger", None)
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(MissingDependencyError, match=r"rllm\[litellm\]"):
        bridge.callback(MemoryTraceStore())
    with pytest.raises(AttributeError, match="no attribute 'handlers'"):
        bridge.handlers  # noqa: B018
