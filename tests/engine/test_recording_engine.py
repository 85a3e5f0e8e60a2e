from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.recording_engine import RecordingEngine, imposed
from rllm.errors import ConfigError, InferenceError, SessionDeletedError, StoreError
from rllm.inference.engine import ModelOutput
from rllm.sdk import session, trajectory
from rllm.sdk.context import Session
from rllm.store.base import TraceStore
from rllm.store.sqlite import SqliteTraceStore
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.tools import Tool
from rllm.types import Trace


def shout(messages: list[dict[str, Any]]) -> str:
    text: str = messages[-1]["content"]
    return text.upper()


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    store = SqliteTraceStore(tmp_path / "traces.db")
    yield store
    store.close()


def texts_of(traces: list[Trace]) -> list[str]:
    return [decode(trace.response_ids) for trace in traces]


async def test_engine_may_return_none_for_missing_fields(store: TraceStore) -> None:
    class Own:
        async def get_model_response(self, messages: Any, **params: Any) -> ModelOutput:
            nothing: Any = None
            return ModelOutput(
                text="four",
                content="four",
                reasoning=nothing,
                tool_calls=nothing,
                prompt_ids=nothing,
                completion_ids=nothing,
            )

    with Session(name="s"):
        output = await RecordingEngine(Own(), store=store).get_model_response(ask("2 + 2?"))
    assert (output.reasoning, output.tool_calls, output.prompt_length, output.finish_reason) == ("", [], 0, None)
    assert [trace.response["content"] for trace in store.by_session("s")] == ["four"]


async def test_tools_may_be_objects_with_a_schema(store: TraceStore) -> None:
    tool = Tool(function=lambda a: a, name="add")
    with Session(name="s"):
        await RecordingEngine(ScriptedEngine(shout), store=store).get_model_response(ask("fig"), tools=[tool])
    (stored,) = store.by_session("s")
    assert stored.tools == [tool.json]


async def test_call_is_durable_before_it_is_answered(store: TraceStore) -> None:
    engine = RecordingEngine(ScriptedEngine(shout, weight_version=3), store=store, model="m")
    with Session(name="s") as around:
        output = await engine.get_model_response(ask("fig"), temperature=0.5)
        (stored,) = store.by_session("s")
    (kept,) = around.llm_calls
    assert stored == kept
    assert (kept.id, kept.model, kept.weight_version) == (output.id, "m", 3)
    assert (kept.prompt_ids, kept.response_ids, kept.logprobs) == (
        output.prompt_ids,
        output.completion_ids,
        output.logprobs,
    )


async def test_calls_are_ordered_by_start_time(store: TraceStore) -> None:
    slow_first = ScriptedEngine(shout, latency_s=lambda messages: 0.02 * (3 - int(messages[-1]["content"])))
    engine = RecordingEngine(slow_first, store=store)
    with Session(name="s") as around:
        await asyncio.gather(*(engine.get_model_response(ask(str(number))) for number in range(3)))
    assert texts_of(around.llm_calls) == ["0", "1", "2"]
    assert texts_of(sorted(store.by_session("s"), key=lambda trace: trace.started_at)) == ["0", "1", "2"]


async def test_messages_are_recorded_as_they_were_at_the_call() -> None:
    engine = RecordingEngine(ScriptedEngine(shout, latency_s=0.01))
    messages = ask("fig")
    with Session(name="s") as around:
        call = asyncio.create_task(engine.get_model_response(messages))
        await asyncio.sleep(0)
        messages[0]["content"] = "changed"
        messages.append({"role": "user", "content": "more"})
        await call
    (kept,) = around.llm_calls
    assert kept.messages == ask("fig")
    assert texts_of([kept]) == ["FIG"]


async def test_continued_conversation_has_its_parent() -> None:
    engine = RecordingEngine(ScriptedEngine(shout))
    with Session(name="s") as around:
        first = await engine.get_model_response(ask("a"))
        await engine.get_model_response([*ask("a"), first.to_message(), *ask("b")])
        await engine.get_model_response(ask("other"))
    assert [trace.parent_id for trace in around.llm_calls] == [None, first.id, None]


async def test_cancelled_call_leaves_no_trace_and_keeps_the_order() -> None:
    engine = RecordingEngine(
        ScriptedEngine(shout, latency_s=lambda messages: 3600 * (messages[-1]["content"] == "slow"))
    )
    with Session(name="s") as around:
        slow = asyncio.create_task(engine.get_model_response(ask("slow")))
        await asyncio.sleep(0)
        await engine.get_model_response(ask("fig"))
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
    assert texts_of(around.llm_calls) == ["FIG"]
    assert around.num_begun == 2


async def test_failed_call_is_stored_with_its_reason(store: TraceStore) -> None:
    engine = RecordingEngine(ScriptedEngine([InferenceError("gone", status_code=503)]), store=store)
    with Session(name="s"), pytest.raises(InferenceError, match="gone"):
        await engine.get_model_response(ask("fig"))
    (kept,) = store.by_session("s")
    assert kept.error == "InferenceError: gone"
    assert (kept.messages, kept.response_ids) == (ask("fig"), [])


async def test_calls_outside_of_sessions_are_not_recorded(store: TraceStore) -> None:
    output = await RecordingEngine(ScriptedEngine(shout), store=store).get_model_response(ask("fig"))
    assert (output.text, output.id) == ("FIG", "")
    assert store.sessions() == []


async def test_sessions_and_trajectories_of_the_sdk_record_calls() -> None:
    engine = RecordingEngine(ScriptedEngine(shout))

    @trajectory(name="solver")
    async def solve(word: str) -> str:
        return (await engine.get_model_response(ask(word))).text

    with Session(name="s") as outer:
        with session(role="judge") as inner:
            await engine.get_model_response(ask("first"))
        path = await solve("second")
    assert texts_of(outer.llm_calls) == ["FIRST", "SECOND"]
    assert texts_of(inner.llm_calls) == ["FIRST"]
    assert inner.llm_calls[0].metadata["role"] == "judge"
    assert [decode(step.response_ids) for step in path.steps] == ["SECOND"]
    assert path.steps[0].logprobs == outer.llm_calls[1].logprobs


async def test_imposed_sampling_replaces_the_requested_one() -> None:
    engine = RecordingEngine(ScriptedEngine(["a long answer"]))
    with Session(name="s") as around, imposed({"temperature": 1.0, "max_tokens": 4}):
        await engine.get_model_response(ask("x"), temperature=0.0, max_tokens=100)
        await engine.get_model_response(ask("x"), max_completion_tokens=2)
    first, second = around.llm_calls
    assert (len(first.response_ids), len(second.response_ids)) == (4, 2)
    assert (first.sampling["temperature"], first.requested_sampling) == (1.0, {"temperature": 0.0, "max_tokens": 100})


async def test_each_call_has_its_own_reproducible_seed() -> None:
    async def seeds(*words: str) -> dict[str, list[int]]:
        with Session(name="s") as around, imposed({"seed": 7}):
            await asyncio.gather(*(engine.get_model_response(ask(word), seed=1) for word in words))
        found: dict[str, list[int]] = {}
        for trace in around.llm_calls:
            found.setdefault(trace.messages[0]["content"], []).append(trace.sampling["seed"])
        return found

    engine = RecordingEngine(ScriptedEngine(shout))
    first = await seeds("fig", "fig", "lime")
    assert first == await seeds("lime", "fig", "fig"), "seeds do not depend on the order of calls"
    assert len({*first["fig"], *first["lime"], 1, 7}) == 5


async def test_several_answers_per_call_are_rejected() -> None:
    engine = RecordingEngine(ScriptedEngine(shout))
    assert (await engine.get_model_response(ask("fig"), n=1)).text == "FIG"
    with pytest.raises(ConfigError, match="n=4: an engine gives one answer"):
        await engine.get_model_response(ask("fig"), n=4)


@pytest.mark.parametrize(
    ("messages", "expected_message"),
    [
        ("fig", r"messages='fig': use a list of messages, such as \[\{"),
        (ask("fig")[0], r"messages=\{.*: use a list of messages"),
        (None, "messages=None: use a list of messages"),
        ([*ask("fig"), "lime"], r"messages\[1\]='lime': use a message, such as \{"),
        ([{"content": "fig"}], r"messages\[0\]=\{'content': 'fig'\}: use a message"),
    ],
)
async def test_messages_that_are_not_a_list_are_rejected(messages: Any, expected_message: str) -> None:
    with pytest.raises(ConfigError, match=expected_message):
        await RecordingEngine(ScriptedEngine(shout)).get_model_response(messages)


async def test_store_error_is_raised(store: TraceStore) -> None:
    engine = RecordingEngine(ScriptedEngine(shout), store=store)
    store.close()
    with Session(name="s") as around, pytest.raises(StoreError, match="closed"):
        await engine.get_model_response(ask("fig"))
    assert around.llm_calls == []


async def test_deleted_session_gets_no_more_calls(store: TraceStore) -> None:
    engine = RecordingEngine(ScriptedEngine(shout), store=store)
    with Session(name="s") as around:
        await engine.get_model_response(ask("fig"))
        store.delete("s")
        with session(nested=True), pytest.raises(SessionDeletedError, match="'s' was deleted"):
            await engine.get_model_response(ask("gum"))
    assert store.session("s") is None
    assert texts_of(around.llm_calls) == ["FIG"]


async def test_attributes_of_the_engine_are_available_except_unrecorded_sampling() -> None:
    model = ScriptedEngine(shout)
    engine = RecordingEngine(model)
    assert engine.outputs is model.outputs
    assert not hasattr(engine, "stream_model_response")
