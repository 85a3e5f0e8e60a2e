"""The engine of these tests, in the fast suite: its samples come from a script, and everything else is real."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.types import DRIFT_KEY, Trace

from .forced_engine import ForcedEngine
from .rerendering import rerender
from .rollouts import drifts_of, num_sequences_of

THOUGHT = "<think>\nI look.\n</think>\n\n"
USER = {"role": "user", "content": "What is it?"}


def traces_of(engine: ForcedEngine, turns: int, suffix: str, exact_turns: bool = True, **asked: Any) -> list[Trace]:
    """Return the calls of an agent that adds text after each answer, and asks again."""
    store, messages = MemoryTraceStore(), [USER]
    config = GatewayConfig(exact_turns=exact_turns, shutdown_timeout_s=1.0)
    with GatewayServer(store, EngineUpstream(engine, "m"), config) as server:
        for _ in range(turns):
            body = {"model": "m", "messages": messages, **asked}
            answer = httpx.post(f"{server.session_url('s')}/chat/completions", json=body, timeout=60).json()
            content = answer["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": content + suffix}, USER]
    return store.by_session("s")


def test_scripted_tokens_are_captured(engine):
    engine.script, engine.sampled = lambda prompt: f"{THOUGHT}Something.", []
    [trace] = traces_of(engine, 1, "")
    [request] = engine.sampled
    assert engine.tokenizer.decode(trace.response_ids) == f"{THOUGHT}Something.<|im_end|>"
    assert (trace.response["content"], trace.response["reasoning_content"]) == ("Something.", "I look.")
    assert (trace.prompt_ids, trace.response_ids, trace.logprobs) == (
        request.prompt_ids,
        request.completion_ids,
        request.logprobs,
    )
    assert len(set(trace.logprobs)) > 5, "log-probabilities come from a model and differ"


def test_text_added_by_an_agent_after_a_stop_string_stays_in_the_sequence(engine):
    engine.script = lambda prompt: f"{THOUGHT}<code>look()</code> and more that is never said"
    traces = traces_of(engine, 3, "</code>\nObserved: 42", stop=["</code>"])
    for one, other in pairwise(traces):
        known = [*one.prompt_ids, *one.response_ids]
        assert other.prompt_ids[: len(known)] == known
        assert other.parent_id == one.id
        assert DRIFT_KEY not in other.metadata
        assert engine.tokenizer.decode(other.prompt_ids[len(known) :]).startswith("\nObserved: 42<|im_end|>")


@pytest.mark.parametrize("asked", [{}, {"stop": ["</code>"]}], ids=["without-stop", "ended-before-it"])
def test_nothing_can_be_added_after_the_end_of_a_turn(engine, asked):
    engine.script = lambda prompt: f"{THOUGHT}look()"
    _, second = traces_of(engine, 2, "</code>", **asked)
    assert second.metadata[DRIFT_KEY] == "edited"
    assert "look()</code><|im_end|>" in engine.tokenizer.decode(second.prompt_ids)


@pytest.mark.parametrize("suffix", ["", " ", " Or not."], ids=["same", "white-space", "edited"])
def test_rerendered_prompts_equal_those_without_exact_turns(engine, suffix):
    engine.script = lambda prompt: f"{THOUGHT}Something."
    rerendered = rerender(traces_of(engine, 3, suffix), engine)
    real = traces_of(engine, 3, suffix, exact_turns=False)
    assert [trace.prompt_ids for trace in rerendered] == [trace.prompt_ids for trace in real]
    assert [trace.metadata for trace in rerendered] == [trace.metadata for trace in real]
    assert (num_sequences_of(rerendered), drifts_of(rerendered)) == (
        3,
        ["edited"] if "not" in suffix else ["reasoning"],
    )
