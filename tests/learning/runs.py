"""A training run of one algorithm with one seed: its settings, and its curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm.algorithms import ALGORITHMS
from rllm.trainer import AgentTrainer
from rllm.workflows.simple_workflow import SimpleWorkflow

from .alphabet import NUM_HELD_OUT, reward, tasks

BESIDE_RL = {"sft", "distill", "sdft", "online"}
"""Names in the registry that learn from demonstrations, a teacher or sessions of users (`examples/online_learning`)."""
NAMES = sorted(ALGORITHMS.keys() - BESIDE_RL)
SEEDS = (0, 1, 2)

NUM_STEPS, EVAL_EVERY = 36, 4
MAX_TOKENS = 12
NUM_JUDGED = 4 * NUM_HELD_OUT
"""Episodes of an evaluation: four of each held-out task."""

SHARED = [
    f"num_steps={NUM_STEPS}",
    "tasks_per_step=8",
    "rollout.group_size=8",
    f"rollout.max_tokens={MAX_TOKENS}",
    "optim.lr=5e-4",
    "optim.num_minibatches=2",
    f"eval.every={EVAL_EVERY}",
    "eval.num_rollouts=4",
    "save_every=0",
    "trackers=[jsonl]",
]
"""With two updates a batch, the second is off-policy, so that ratios and clips take part."""

OWN: dict[str, list[str]] = {
    # The critic is untrained, and gets two steps to learn the mean reward before the policy is updated.
    "ppo": ["critic.lr=1e-3", "critic.warmup_steps=2"],
    # Two of DAPO's four parts; the other two are the algorithm's defaults.
    "dapo": [
        "rollout.resample_rounds=2",
        f"algorithm.overlong_length={MAX_TOKENS}",
        "algorithm.overlong_buffer=2",
    ],
    # Both are published with a divergence from the reference: subtracted from the rewards, or k2 in the loss.
    "reinforce_plus_plus": ["algorithm.kl_coef=0.001", "algorithm.kl_in=reward"],
    "reinforce_plus_plus_baseline": ["algorithm.kl_coef=0.001"],
}
"""Settings that the form of a paper adds to the shared ones; other algorithms need none."""

CURVES = Path(__file__).parents[2] / "runs" / "learning"
"""Folder of the curves for `benchmarks/learning.py`."""


def train(name: str, seed: int, *, policy: Path, run_dir: Path, settings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train, and return every line of the run's metrics, those of evaluations included."""
    train_tasks, held_out = tasks(seed)
    identity = [f"model.path={policy}", f"run_dir={run_dir}", f"seed={seed}", f"algorithm.name={name}"]
    AgentTrainer(
        workflow_class=SimpleWorkflow,
        workflow_args={"reward_function": reward},
        train_dataset=train_tasks,
        val_dataset=held_out,
        config=[*identity, *SHARED, *OWN.get(name, []), *settings],
    ).train()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve_of(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the mean reward on held-out tasks by number of steps."""
    return {line["step"]: round(line["eval/reward"], 4) for line in lines if "eval/reward" in line}


def keep(name: str, seed: int, curve: dict[int, float]) -> None:
    """Write a curve to the folder from which the picture is drawn."""
    CURVES.mkdir(parents=True, exist_ok=True)
    (CURVES / f"{name}-{seed}.json").write_text(json.dumps({"name": name, "seed": seed, "curve": curve}))
