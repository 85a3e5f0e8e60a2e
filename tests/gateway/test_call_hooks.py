"""Spans of calls, and the trace that a call is part of.

They are created after the answer is sent, so a test stops the gateway before it reads them.
"""

import threading

import httpx
import pytest

from rllm import telemetry
from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.upstream import EngineUpstream
from rllm.sdk import get_chat_client, session, trajectory
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine

from ..telemetry.collector import collecting
from ..waiting import wait_for
from .held_engine import HeldEngine, HeldStore

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
BODY = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}


@pytest.fixture
def collector(monkeypatch):
    with collecting(monkeypatch) as collected:
        yield collected


class Listening(EngineUpstream):
    """Upstream that records the headers forwarded with each call."""

    def __init__(self):
        super().__init__(ScriptedEngine(["hello"]), "m")
        self.headers = []

    async def complete(self, call):
        self.headers.append(dict(call.headers))
        return await super().complete(call)


async def test_upstream_gets_the_w3c_trace_of_the_request():
    upstream = Listening()
    app = create_app(MemoryTraceStore(), upstream)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        for headers in ({"traceparent": TRACEPARENT, "tracestate": "a=b", "authorization": "Bearer sk-secret"}, {}):
            answer = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
    assert upstream.headers == [{"traceparent": TRACEPARENT, "tracestate": "a=b"}, {}]


def test_call_is_part_of_the_trace_named_by_its_request(serve, collector):
    served = serve(["hello"], config=GatewayConfig(otel=True, shutdown_timeout_s=1.0))
    served.post(json={**BODY, "top_p": 0.5, "stop": ["a secret"]}, headers={"traceparent": TRACEPARENT})
    served.server.stop()
    span = collector.named("chat scripted")
    assert (span.trace_id, span.parent_id, span.kind) == (TRACE_ID, PARENT_ID, "CLIENT")
    [trace] = served.store.by_session("s")
    assert span.attributes["rllm.trace_ids"] == [trace.id]
    assert span.attributes["gen_ai.conversation.id"] == span.attributes["rllm.session_id"] == "s"
    assert span.attributes["gen_ai.request.top_p"] == 0.5
    assert span.attributes["rllm.dialect"] == "chat"
    assert span.attributes["rllm.response_ids.length"] == 6
    assert span.seconds == pytest.approx(trace.timings["total_s"], abs=1e-4)
    assert b"secret" not in b"".join(collector.requests)


def test_values_unsupported_by_spans_are_left_out(serve, collector):
    served = serve(upstream="http", config=GatewayConfig(otel=True, shutdown_timeout_s=1.0))
    served.post(
        json={**BODY, "seed": 2**63, "temperature": "hot", "top_p": 0.5}, headers={"traceparent": "00-nonsense"}
    )
    served.server.stop()
    [span] = collector.spans()
    found = span.attributes
    assert found["gen_ai.request.top_p"] == 0.5
    assert {"gen_ai.request.seed", "gen_ai.request.temperature"}.isdisjoint(found)


def test_each_dialect_and_failure_has_its_span(serve, collector):
    served = serve(upstream="http", config=GatewayConfig(otel_response_ids=True, otel=True, shutdown_timeout_s=1.0))
    served.post("/v1/completions", json={"model": "m", "prompt": "a", "stream": True})
    served.post("/v1/messages", json={**BODY, "max_tokens": 9})
    served.upstream.fault = "error"
    served.post("/v1/responses", json={"model": "m", "input": "a"})
    served.post(json={"messages": []}, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
    served.server.stop()
    whole, message, failed, refused = collector.spans()
    assert (whole.name, whole.attributes["rllm.dialect"]) == ("text_completion scripted", "completions")
    assert whole.attributes["rllm.stream"] is True
    assert len(whole.attributes["rllm.response_ids"]) == whole.attributes["rllm.response_ids.length"]
    assert message.attributes["rllm.dialect"] == "messages"
    assert (failed.attributes["error.type"], failed.status) == ("500", "ERROR")
    assert (refused.attributes["error.type"], refused.status) == ("400", "ERROR")
    assert (refused.trace_id, refused.parent_id) == (TRACE_ID, PARENT_ID)


def test_calls_of_an_agent_are_parts_of_its_span(serve, collector):
    served = serve(["hello"], config=GatewayConfig(otel=True, shutdown_timeout_s=1.0))

    @trajectory(name="solver")
    def agent():
        client = get_chat_client(base_url=served.server.session_url("s"), api_key="unused")
        return client.chat.completions.create(model="m", messages=BODY["messages"]).choices[0].message.content

    with session():
        assert agent().result == "hello"
    served.server.stop()
    agent_span, call_span = collector.named("invoke_agent solver"), collector.named("chat scripted")
    assert (call_span.trace_id, call_span.parent_id) == (agent_span.trace_id, agent_span.span_id)
    assert telemetry.outgoing_headers() == {}


@pytest.mark.parametrize("leaves", [False, True])
def test_span_ends_after_traces_are_durable(serve, collector, leaves):
    store = HeldStore()
    served = serve(HeldEngine(["abcd"]), config=GatewayConfig(otel=True, shutdown_timeout_s=1.0), store=store)
    if leaves:
        served.ask_and_leave()
    else:
        served.engine.go.set()
        agent = threading.Thread(target=served.post)
        agent.start()
    assert store.asked.wait(60)
    assert served.http.get("/healthz").status_code == 200, "the gateway still responds"
    assert "rllm_gateway_traces_total 0.0\n" in served.http.get("/metrics").text
    store.release.set()
    wait_for(lambda: "rllm_gateway_traces_total 1.0\n" in served.http.get("/metrics").text)
    if not leaves:
        agent.join(60)
    served.server.stop()
    [span] = collector.spans()  # a span created before the traces were durable would be absent
    assert span.attributes.get("error.type") == ("499" if leaves else None)
