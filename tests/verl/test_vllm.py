"""Two workers of verl, sampled by a real vLLM: it gets the weights after each update, and proves that it has them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rllm.testing.tiny_policy import tiny_policy

from .test_runs import WORKFLOW, rewards, train

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # fewer processes to start
}


@pytest.fixture
def vllm_command(monkeypatch: pytest.MonkeyPatch) -> str:
    """The program of the environment that `make test-vllm` installs."""
    command = Path(os.environ.get("RLLM_TEST_VLLM", ".vllm")).absolute() / "bin" / "vllm"
    assert command.exists(), f"{command} is not there: run `make test-verl`"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return str(command)


@pytest.fixture
def wide_policy() -> Path:
    """The policy of the alphabet, with heads of 32, the smallest for vLLM's attention on CPUs, and room for the probe."""
    from learning.alphabet import RECIPE, STARTS_CORRECTLY, conversations

    return tiny_policy(
        partial(conversations, starts_correctly=1.0),
        partial(conversations, starts_correctly=STARTS_CORRECTLY),
        recipe=replace(RECIPE, hidden_size=128, context_length=256),
    )


def test_workflow_learns_from_vllm_samples(cluster: None, vllm_command: str, wide_policy: Path, tmp_path: Path) -> None:
    settings = ["algorithm.name=grpo", "num_steps=12", "eval.every=0", "save_every=0", "rollout.timeout_s=1800"]
    served = ["model.engine=vllm", f"vllm.command={vllm_command}", 'vllm.args=["--enforce-eager"]']
    lines = train(
        tmp_path / "run", [f"model.path={wide_policy}", *settings, *served, "vllm.start_timeout_s=900"], **WORKFLOW
    )
    before, after = rewards(lines)
    assert after > before + 0.15
    steps = [line for line in lines if "policy/loss" in line]
    assert [line["policy/weight_version"] for line in steps] == list(range(1, 13))
    assert max(line["policy/sampler_gap_max"] for line in steps if "policy/loss" in line) < 1e-4
