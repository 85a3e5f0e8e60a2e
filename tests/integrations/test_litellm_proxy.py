"""A real `litellm` proxy process: with the callback in front of a vLLM-shaped server, and as an upstream without token ids.

RLLM_LITELLM=.litellm pytest -m litellm tests/integrations
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import HTTPUpstream
from rllm.store import open_store
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..ports import free_port
from ..waiting import wait_for

pytestmark = pytest.mark.litellm

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def answer_to(messages):
    """Return the model's answer to a prompt."""
    asked = messages[-1]["content"]
    return {"tool": {"tool_calls": [CALL]}, "think": {"content": "4", "reasoning": "2 and 2"}}.get(
        asked, f"You said: {asked}."
    )


CONFIG = """
model_list:
  - model_name: captured
    litellm_params: {{model: hosted_vllm/scripted, api_base: "{upstream}", api_key: none}}
  - model_name: marked
    litellm_params: {{model: openai/scripted, api_base: "{upstream}", api_key: none}}
    model_info: {{rllm: true}}
  - model_name: provider
    litellm_params: {{model: openai/scripted, api_base: "{upstream}", api_key: none}}
litellm_settings:
  callbacks: rllm.integrations.litellm.handler
  num_retries: 0
router_settings:
  disable_cooldowns: true
"""


@pytest.fixture(scope="module")
def upstream():
    with ScriptedServer(ScriptedEngine(answer_to)) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(upstream, tmp_path_factory):
    """A client of a running proxy, and the store that it writes to."""
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "config.yaml").write_text(CONFIG.format(upstream=upstream.base_url))
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(os.environ["RLLM_LITELLM"]).absolute()),
        "RLLM_STORE": str(folder / "traces.db"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    start = "from litellm import run_server; run_server()"
    command = [sys.executable, "-c", start, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, verify=False) as client:
            wait_for(lambda: is_alive(client, process, folder / "log"), 600)
            with open_store(str(folder / "traces.db")) as store:
                yield client, store
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def is_alive(client, process, log):
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return client.get("/health/liveliness").status_code == 200
    except httpx.TransportError:
        return False


def ask(proxy, session_id, content, *, model="captured", headers=(), **fields):
    body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
    return proxy[0].post("/v1/chat/completions", json=body, headers={"x-rllm-session": session_id, **dict(headers)})


def events_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def outputs_of(upstream, content):
    """Return the engine's own records of the answers to this content, as a set: those of one call have no fixed order."""
    asked = [output for output in upstream.engine.outputs if content in output.text]
    return {(tuple(output.prompt_ids), tuple(output.completion_ids), tuple(output.logprobs)) for output in asked}


def tokens_of(traces):
    return {(tuple(trace.prompt_ids), tuple(trace.response_ids), tuple(trace.logprobs)) for trace in traces}


@pytest.mark.parametrize("model", ["captured", "marked"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_traces_hold_the_exact_sampled_tokens(proxy, upstream, model, stream, n):
    content = f"say-{model}-{stream}-{n}"
    answer = ask(proxy, content, content, model=model, stream=stream, n=n, temperature=0.5)
    answer_id = events_of(answer)[0]["id"] if stream else answer.json()["id"]
    traces = proxy[1].by_session(content)
    assert [trace.id for trace in traces] == [answer_id, f"{answer_id}:1"][:n]
    assert tokens_of(traces) == outputs_of(upstream, content)
    assert {trace.error for trace in traces} == {None}
    assert {trace.sampling["temperature"] for trace in traces} == {0.5}
    assert [trace.messages for trace in traces] == [[{"role": "user", "content": content}]] * n


def test_streamed_and_unstreamed_calls_give_equal_traces(proxy):
    for asked in ("tool", "think"):
        for stream in (False, True):
            assert ask(proxy, f"{asked}-{stream}", asked, stream=stream).status_code == 200
        [whole], [streamed] = proxy[1].by_session(f"{asked}-False"), proxy[1].by_session(f"{asked}-True")
        assert whole.response_ids == streamed.response_ids
        assert whole.finish_reason == streamed.finish_reason
        for field in ("content", "reasoning_content"):
            assert whole.response.get(field) == streamed.response.get(field)
        assert (whole.response.get("tool_calls") or None) == streamed.response.get("tool_calls")


def test_later_turns_continue_earlier_ones(proxy):
    first = ask(proxy, "turns", "one").json()
    answer = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "You said: one."}]
    second = ask(proxy, "turns", "one", messages=[*answer, {"role": "user", "content": "two"}]).json()
    traces = proxy[1].by_session("turns")
    assert [(trace.id, trace.parent_id) for trace in traces] == [(first["id"], None), (second["id"], first["id"])]


def test_stream_abandoned_by_its_client_keeps_sampled_tokens(proxy, upstream):
    body = {"model": "captured", "messages": [{"role": "user", "content": "never ends"}], "stream": True}
    upstream.fault = "stall"
    try:
        with proxy[0].stream("POST", "/v1/chat/completions", json=body, headers={"x-rllm-session": "left"}) as answer:
            next(answer.iter_lines())
    finally:
        upstream.fault = None
    wait_for(lambda: proxy[1].by_session("left"), 120)
    [trace] = proxy[1].by_session("left")
    assert trace.finish_reason == "abort"
    assert "disconnected" in trace.error
    assert 0 < len(trace.response_ids) == len(trace.logprobs) <= 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "reason"), [("error", "the engine core has died"), ("mismatch", "log-probabilit")])
def test_failed_call_is_recorded_with_its_reason(proxy, upstream, fault, reason, stream):
    upstream.fault = fault
    try:
        answer = ask(proxy, f"{fault}-{stream}", "hi", stream=stream)
    finally:
        upstream.fault = None
    assert '"error"' in answer.text
    assert stream or answer.status_code >= 500
    traces = proxy[1].by_session(f"{fault}-{stream}")
    assert traces
    assert all(reason in trace.error for trace in traces)


def test_session_is_named_as_in_the_gateway(proxy):
    ask(proxy, "", "key", headers={"authorization": "Bearer rllm-by-key"})
    ask(proxy, "", "metadata", metadata={"rllm_session": "by-metadata"})
    ask(proxy, "by-header", "header", headers={"x-rllm-metadata": '{"agent": "solver"}'})
    for name in ("key", "metadata", "header"):
        [trace] = proxy[1].by_session(f"by-{name}")
        assert trace.messages[0]["content"] == name
    assert proxy[1].by_session("by-header")[0].metadata["agent"] == "solver"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_calls_translated_by_litellm_are_captured_once(proxy, path, body, stream):
    name = f"{path.rpartition('/')[2]}-{stream}"
    headers = {"x-rllm-session": name, "anthropic-version": "2023-06-01"}
    answer = proxy[0].post(path, json={"model": "captured", "stream": stream, **body}, headers=headers)
    assert answer.status_code == 200
    [trace] = proxy[1].by_session(name)
    assert (trace.error, trace.response["content"]) == (None, "You said: hi.")
    assert len(trace.response_ids) == len("You said: hi.") + 1


async def test_litellm_upstream_serves_evaluation_and_rejects_training(proxy, upstream):
    """A provider called through LiteLLM gives no token ids; `upstream` is configured as one."""
    from openai import AsyncOpenAI

    async def agent(base_url):
        async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            answer = await client.chat.completions.create(
                model="provider", messages=[{"role": "user", "content": "hi"}]
            )
        return float("hi" in (answer.choices[0].message.content or ""))

    store = MemoryTraceStore()
    provider = HTTPUpstream(f"{str(proxy[0].base_url).rstrip('/')}/v1", kind="openai")
    upstream.fault = "no_tokens"
    try:
        with (
            GatewayServer(store, provider, GatewayConfig(shutdown_timeout_s=1.0)) as gateway,
            AgentFunctionEngine(agent, gateway=gateway, store=store) as engine,
        ):
            trying = [RolloutRequest(task={}, task_id="t", index=index, tokens_required=not index) for index in (0, 1)]
            trained, evaluated = await RolloutRunner(engine, timeout_s=300, num_retries=0).run(trying)
    finally:
        upstream.fault = None
    assert trained.info["error"]["type"] == "CaptureError"
    for expected in ("lacks prompt_token_ids and choices[0].token_ids", "return_token_ids: true", "not trained on"):
        assert expected in trained.info["error"]["message"]
    [trajectory] = evaluated.trajectories
    assert (trajectory.reward, trajectory.steps[0].model_response) == (1.0, "You said: hi.")
