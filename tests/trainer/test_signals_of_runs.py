"""Every warning about a run, logged in the first step of a real one; and every metric of such a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.algorithms.batch import Batch
from rllm.backends.base import UpdatePlan
from rllm.backends.local.backend import LocalBackend
from rllm.errors import RewardError, boundary
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import Trajectory

from . import mortal_run
from .conftest import ask, merged


class Disagreeing(LocalBackend):
    """Backend whose weights change without a publish."""

    def begin_update(self, batch: Batch) -> UpdatePlan:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1.5)
        return super().begin_update(batch)


def varied(question: str, base_url: str) -> float:
    return float(len(ask(base_url, question, max_tokens=12)) % 3)


def alike(question: str, base_url: str) -> float:
    ask(base_url, question, max_tokens=12)
    return 0.0


def cut_off(question: str, base_url: str) -> float:
    return float(len(ask(base_url, question, max_tokens=1)) % 2)


def with_separate_names(question: str, base_url: str) -> Trajectory:
    """Return trajectories with different names."""
    return Trajectory(name=f"agent {base_url}", reward=varied(question, base_url))


def badly_judged(question: str, base_url: str) -> float:
    answer = ask(base_url, question, max_tokens=12)
    with boundary(RewardError, "the reward"):
        if len(answer) % 4:
            raise ValueError("no idea")
    return float(len(answer) % 3)


@pytest.fixture(scope="module")
def model(policies: Path) -> Path:
    return mortal_run.policy(policies)


def first_step(model: Path, run_dir: Path, agent: Callable[..., Any], changes: Mapping[str, Any]) -> dict[str, float]:
    config = {
        "model": {"path": str(model)},
        "run_dir": str(run_dir),
        "num_steps": 1,
        "tasks_per_step": 3,
        "rollout": {"group_size": 4},
        "trackers": ["jsonl"],
    }
    data = mortal_run.QUESTIONS
    AgentTrainer(agent_run_func=agent, train_dataset=data, config=merged(config, changes)).train()
    line: dict[str, float] = json.loads((run_dir / "metrics.jsonl").read_text())
    return line


@pytest.mark.parametrize(
    ("name", "agent", "changes", "remedy"),
    [
        ("no_variance", alike, {}, "use tasks that are neither too hard nor too easy"),
        ("all_dropped", varied, {"roles": {"agent": {"trainable": False}}}, "on (12 x dropped/not_trainable)"),
        pytest.param(
            "all_dropped", with_separate_names, {}, "on (12 x dropped/too_few_siblings)", marks=pytest.mark.slow
        ),
        pytest.param("all_truncated", cut_off, {}, "raise rollout.max_tokens", marks=pytest.mark.slow),
        ("many_truncated", varied, {}, "raise rollout.max_tokens"),
        pytest.param("rewards_raise", badly_judged, {}, "see the warnings above", marks=pytest.mark.slow),
        ("ratio_overflow", varied, {"optim": {"lr": 0.3, "num_epochs": 6}}, "lower optim.lr"),
        pytest.param(
            "entropy_collapse",
            alike,
            {"rollout": {"temperature": 1e-4}},
            "algorithm.entropy_coef",
            marks=pytest.mark.slow,
        ),
        (
            "sampler_disagrees",
            varied,
            {"backend": f"{__name__}:Disagreeing"},
            "set algorithm.correction=truncate",
        ),
    ],
)
def test_health_warning_is_logged_within_one_step(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    agent: Callable[..., Any],
    changes: Mapping[str, Any],
    remedy: str,
) -> None:
    assert first_step(model, tmp_path, agent, changes)[f"signal/{name}"] == 1.0
    printed = [message for message in caplog.messages if message.startswith(f"step 1, {name}: ")]
    assert len(printed) == 1
    assert remedy in printed[0]


def test_healthy_step_has_all_metrics_and_no_warning(model: Path, tmp_path: Path) -> None:
    line = first_step(model, tmp_path, varied, {"algorithm": {"name": "grpo", "kl_coef": 0.01}, "optim": {"lr": 1e-4}})
    assert [name for name in line if name.startswith("signal/")] == ["signal/many_truncated"]
    assert line.keys() >= {
        *(f"{name}{part}" for name in ("rollout/reward", "batch/advantage") for part in ("", "_p10", "_p90")),
        *(
            f"policy/{name}"
            for name in ("ratio", "clip_fraction", "kl", "update_kl", "sampler_kl", "entropy", "grad_norm", "loss")
        ),
        *(f"tokens/{name}" for name in ("drift", "staleness", "staleness_max", "sampled", "trained")),
        *(f"tokens/per_second{phase}" for phase in ("", "_rollout", "_update")),
        *("batch/zero_variance", "memory/peak_gb", "optim/lr", "timing/rollout_s", "timing/update_s"),
    }
    assert line["policy/kl"] == line["tokens/staleness"] == line["tokens/drift"] == 0.0, "before the first update"
    assert (line["policy/ratio"], line["policy/clip_fraction"]) == (pytest.approx(1.0), 0.0)
    assert line["policy/sampler_kl"] == pytest.approx(0.0, abs=1e-8)
    assert line["policy/entropy"] == pytest.approx(line["rollout/entropy"], rel=0.5), "one is exact, one of samples"
