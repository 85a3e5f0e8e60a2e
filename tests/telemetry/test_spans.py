"""Spans of agents, tools, rollouts and calls, as a collector receives them."""

import asyncio
import subprocess
import sys

import pytest

from rllm import telemetry
from rllm.engine.recording_engine import RecordingEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.errors import InferenceError, MissingDependencyError
from rllm.gateway.sessions import Sessions
from rllm.sdk import session, trajectory
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.tools.tool_base import Tool
from rllm.types import Episode, Trace


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.slow
def test_opentelemetry_is_not_imported_until_enabled():
    code = (
        "import rllm.sdk, rllm.tools.tool_base, rllm.engine.runner, rllm.gateway.app, sys; print('opentelemetry' in "
        "{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "False\n"


def test_disabled_telemetry_exports_nothing(collector):
    @trajectory
    def agent():
        return Tool(function=add)(1, 2).output

    assert agent().result == 3
    assert telemetry.outgoing_headers() == {}
    assert collector.spans() == []


def test_missing_opentelemetry_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "rllm.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingDependencyError, match=r"rllm\[otel\]"):
        telemetry.enable()


def test_tool_called_by_an_agent_is_part_of_its_span(spans):
    @trajectory(name="solver")
    def agent():
        return Tool(function=add)(1, 2).output

    with session() as around:
        agent()
    agent_span, tool_span = spans.named("invoke_agent solver"), spans.named("execute_tool add")
    assert (tool_span.trace_id, tool_span.parent_id) == (agent_span.trace_id, agent_span.span_id)
    assert tool_span.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.provider.name": "rllm",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.type": "function",
    }
    assert agent_span.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "rllm",
        "gen_ai.agent.name": "solver",
        "gen_ai.conversation.id": around.name,
        "rllm.num_steps": 0,
    }
    assert {agent_span.status, tool_span.status} == {"UNSET"}
    assert agent_span.service == "rllm"


async def test_async_agent_has_one_span_with_its_calls(spans):
    engine = RecordingEngine(ScriptedEngine(["four"], weight_version=7), model="policy")

    @trajectory(name="solver")
    async def agent():
        await Tool(function=add).call({"a": 1, "b": 2})
        output = await engine.get_model_response([{"role": "user", "content": "2 + 2?"}], temperature=0.5)
        return output.id

    done = await agent()
    agent_span, call_span = spans.named("invoke_agent solver"), spans.named("chat policy")
    assert spans.named("execute_tool add").parent_id == agent_span.span_id
    assert (call_span.parent_id, call_span.kind) == (agent_span.span_id, "CLIENT")
    found = call_span.attributes
    assert found["gen_ai.response.id"] == done.result
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.output_tokens"] == found["rllm.response_ids.length"] == len("four") + 1
    assert found["gen_ai.usage.input_tokens"] == found["rllm.prompt_ids.length"] == len(done.steps[0].prompt_ids)
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert (found["rllm.weight_version"], found["rllm.usable"]) == (7, True)
    assert "rllm.response_ids" not in found
    assert agent_span.attributes["rllm.num_steps"] == 1


async def test_failures_record_their_type_and_no_content(spans):
    engine = RecordingEngine(ScriptedEngine([InferenceError("secret reason")]))

    @trajectory
    async def agent():
        Tool(function=add)(1, "secret argument")
        await engine.get_model_response([{"role": "user", "content": "secret question"}])

    with pytest.raises(InferenceError):
        await agent()
    assert [(span.name, span.attributes["error.type"], span.status) for span in spans.spans()] == [
        ("execute_tool add", "tool_error", "ERROR"),
        ("chat policy", "InferenceError", "ERROR"),
        ("invoke_agent agent", "InferenceError", "ERROR"),
    ]
    assert b"secret" not in b"".join(spans.requests)


def test_span_with_an_unpaired_surrogate_in_its_name_is_exported(spans):
    @trajectory(name="half \ud83e")
    def agent():
        return Tool(function=add)(1, 2).output

    agent()
    trace = Trace(
        id="c", call_id="c", session_id="s\ud83e", model="m\ud83e", messages=[], response={}, finish_reason="\ud83e"
    )
    telemetry.record_call([trace])
    assert spans.named("execute_tool add").attributes["gen_ai.tool.name"] == "add"
    assert spans.named("invoke_agent half \\ud83e").attributes["gen_ai.agent.name"] == "half \\ud83e"
    found = spans.named("chat m\\ud83e").attributes
    assert (found["rllm.session_id"], found["gen_ai.response.finish_reasons"]) == ("s\\ud83e", ["\\ud83e"])


async def test_rollout_is_a_span_with_its_task_and_calls(spans):
    class Adding:
        async def rollout(self, attempt):
            await asyncio.sleep(0)
            if attempt.index:
                raise InferenceError("no")
            await Tool(function=add).call({"a": 1, "b": 2})
            return Episode(task_id=attempt.task_id)

    attempts = [RolloutRequest(task={}, task_id="t:1", index=index, training_step=3) for index in (0, 1)]
    await RolloutRunner(Adding(), num_retries=0).run(attempts)
    well, failed = sorted(
        (span for span in spans.spans() if span.name == "invoke_agent rollout"),
        key=lambda s: s.attributes["rllm.index"],
    )
    assert spans.named("execute_tool add").parent_id == well.span_id
    assert well.attributes["rllm.task_id"] == "t:1"
    assert well.attributes["rllm.training_step"] == 3
    assert well.attributes["gen_ai.conversation.id"] == attempts[0].session_id
    assert (failed.status, failed.attributes["error.type"]) == ("ERROR", "InferenceError")


async def test_session_belongs_to_the_span_that_opened_it(spans):
    store = MemoryTraceStore()
    with telemetry.agent_span("agent").active():
        Sessions(store).open("s", metadata=None, sampling=None).result(60)
        opened_in = telemetry.outgoing_headers()
    assert (await Sessions(store).get("s")).trace_context == opened_in != {}


async def test_sampled_ids_are_exported_if_enabled(collector):
    telemetry.enable(response_ids=True)
    engine = RecordingEngine(ScriptedEngine(["A"]))
    with session():
        await engine.get_model_response([{"role": "user", "content": "hi"}])
    assert collector.named("chat policy").attributes["rllm.response_ids"] == [65, 257]


OWN_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rllm import telemetry
from rllm.tools.tool_base import Tool


def add(a: int, b: int) -> int:
    return a + b


exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
telemetry.enable()
with trace.get_tracer("mine").start_as_current_span("mine") as mine:
    print(telemetry.outgoing_headers()["traceparent"].split("-")[2] == f"{mine.get_span_context().span_id:016x}")
    Tool(function=add)(1, 2)
telemetry.disable()
with trace.get_tracer("mine").start_as_current_span("later"):
    pass
tool, mine, later = exporter.get_finished_spans()
print(tool.name, tool.parent.span_id == mine.context.span_id, later.name)
"""


@pytest.mark.slow
def test_tracer_of_the_program_gets_the_spans():
    done = subprocess.run([sys.executable, "-c", OWN_PROVIDER], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "True\nexecute_tool add True later\n"
    assert done.stderr == ""
