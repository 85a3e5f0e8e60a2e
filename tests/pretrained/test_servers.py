"""A pretrained model in other systems: sampled by a real vLLM on the CPU, and trained by real workers of verl on Ray."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm.store import open_store
from rllm.workflows.simple_workflow import SimpleWorkflow

from .sums import train

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
SMALL = ["num_steps=2", "tasks_per_step=4", "rollout.group_size=4", "rollout.timeout_s=1800"]


def is_even(task: Any, answer: str) -> float:
    """Return a reward that differs within nearly every group; right answers are too rare for two steps to have both."""
    return float(len(answer) % 2 == 0)


AGENT = {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_function": is_even}}


def test_vllm_samples_with_the_weights_of_each_update(
    smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Path(os.environ.get("RLLM_TEST_VLLM", ".vllm")).absolute() / "bin" / "vllm"
    assert command.exists(), f"{command} is not there: run `make test-pretrained`"
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        monkeypatch.setenv(name, value)
    lines = train(
        smollm,
        tmp_path / "run",
        *(*SMALL, "save_every=1", "model.engine=vllm", f"vllm.command={command}", "vllm.start_timeout_s=900"),
        *("vllm.args=[--enforce-eager]", "model.max_length=512"),
        **AGENT,
    )
    steps = [line for line in lines if "policy/loss" in line]
    assert [line["policy/weight_version"] for line in steps] == [1, 2]
    assert max(line["policy/sampler_gap_max"] for line in steps) < 1e-3

    updated = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000001").eval()
    original = AutoModelForCausalLM.from_pretrained(smollm).eval()
    with open_store(str(tmp_path / "run" / "traces.db"), read_only=True) as store:
        traces = [trace for session in store.sessions() for trace in store.by_session(session.id)]
    second = [trace for trace in traces if trace.weight_version == 1][:8]
    assert len(second) == 8
    gaps = {}
    for name, model in {"updated": updated, "original": original}.items():
        gaps[name] = 0.0
        for trace in second:
            ids = torch.tensor([[*trace.prompt_ids, *trace.response_ids]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, len(trace.prompt_ids) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(trace.response_ids)[:, None])[:, 0]
            gaps[name] = max(gaps[name], float((chosen - torch.tensor(trace.logprobs)).abs().max()))
    assert 10 * gaps["updated"] < min(gaps["original"], 1e-2), gaps


@pytest.mark.filterwarnings("ignore")
def test_verl_trains_the_model_for_two_steps(smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec("verl"), "verl is not there: run `make test-pretrained`"
    monkeypatch.setenv(
        "RAY_AUTH_MODE", "disabled"
    )  # else Ray writes a key into the home of the user who runs the tests
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    lines = train(smollm, tmp_path / "run", *SMALL, "backend=verl", "verl.timeout_s=1800", **AGENT)
    steps = [line for line in lines if "policy/loss" in line]
    assert [line["policy/weight_version"] for line in steps] == [1, 2]
    assert max(line["policy/sampler_gap_max"] for line in steps) < 1e-3
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000002")
