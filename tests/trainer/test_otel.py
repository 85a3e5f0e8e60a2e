"""`gateway.otel`: a run whose rollouts are exported to a collector."""

from __future__ import annotations

import pytest

from ..telemetry.collector import collecting
from .conftest import RunTrainer


def test_rollouts_of_a_run_and_their_calls_are_traced(run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as collector:
        run = run_trainer({"num_steps": 1, "gateway": {"otel": True}})
        spans = collector.spans()
    rollouts = [span for span in spans if span.name == "invoke_agent rollout"]
    calls = [span for span in spans if span.name.startswith("chat ")]
    assert len(rollouts) == len(calls) == len(run.urls) > 0
    assert {span.attributes["rllm.training_step"] for span in rollouts} == {0}
    sessions = {span.attributes["gen_ai.conversation.id"] for span in rollouts}
    assert {span.attributes["gen_ai.conversation.id"] for span in calls} == sessions
    assert {span.parent_id for span in calls} == {span.span_id for span in rollouts}
    assert all(span.attributes["rllm.usable"] for span in calls)
