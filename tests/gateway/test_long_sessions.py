"""A long session, on a durable store: exact, and memory and store grow only with its tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store import open_store
from rllm.trainer.sequences import sequences_of
from rllm.types import Step

from ..frameworks.forced_engine import ForcedEngine

NUM_TURNS = 60


@pytest.mark.slow
def test_session_of_many_turns_is_one_exact_sequence(tmp_path: Path) -> None:
    engine = ForcedEngine(lambda prompt: f"Step {len(prompt)}.")
    messages = [{"role": "user", "content": "Begin."}]
    with (
        open_store(tmp_path / "traces.db") as store,
        GatewayServer(store, EngineUpstream(engine, "m"), GatewayConfig(shutdown_timeout_s=1.0)) as server,
        httpx.Client() as client,
    ):
        for turn in range(NUM_TURNS):
            body = {"model": "m", "messages": messages}
            answer = client.post(f"{server.session_url('s')}/chat/completions", json=body, timeout=60).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"Result {turn} " * 20}]
        traces = store.by_session("s")
    engine.close()
    sampled = [(request.prompt_ids, request.completion_ids) for request in engine.sampled]
    assert [(trace.prompt_ids, trace.response_ids) for trace in traces] == sampled
    assert all(trace.parent_id == before.id for before, trace in pairwise(traces))
    steps = [Step(id=trace.id) for trace in traces]
    for step, trace in zip(steps, traces, strict=True):
        step.fill_from(trace)
    [sequence] = sequences_of(steps)
    assert len(sequence.spans) == NUM_TURNS
    stored = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert stored < 200 * len(sequence.ids), "whole prompts would take thirty times as many bytes"
