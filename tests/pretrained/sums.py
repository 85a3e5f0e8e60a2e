"""Training on the sums of `rllm demo --model`, in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rllm.demo.tasks import sum_tasks
from rllm.trainer import AgentTrainer
from rllm.types import Task
from rllm.workflows.simple_workflow import SimpleWorkflow

GAIN = 0.12
"""Minimum improvement of the accuracy on held-out tasks by training."""
NUM_HELD_OUT = 200
SETTINGS = {
    "model.device": "cpu",
    "num_steps": "15",
    "tasks_per_step": "8",
    "rollout.group_size": "8",
    "rollout.max_tokens": "48",
    "optim.micro_batch_tokens": "1024",
    "eval.every": "0",
    "save_every": "0",
    "trackers": "[jsonl]",
}


def right(task: Task, answer: str) -> float:
    """Return 1 if the last number of the answer is right, else 0."""
    return float(re.findall(r"-?\d+", answer)[-1:] == [str(task["answer"])])


def train(model: Path, run_dir: Path, *settings: str, evaluate: bool = False, **agent: Any) -> list[dict[str, Any]]:
    """Train, and return every line of the run's metrics; with `evaluate`, held-out tasks are run before and after."""
    held_out = sum_tasks(NUM_HELD_OUT, seed=-1)
    own = dict(setting.split("=", 1) for setting in [f"model.path={model}", *settings])
    by_default = {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_function": right}}
    AgentTrainer(
        **(agent or by_default),
        train_dataset=[task for task in sum_tasks(1000, seed=0) if task not in held_out],
        val_dataset=held_out if evaluate else None,
        config=[f"{key}={value}" for key, value in {**SETTINGS, **own, "run_dir": run_dir}.items()],
    ).train()
    return lines_of(run_dir)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
