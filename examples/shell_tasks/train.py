"""Learn to work in a shell: `python examples/shell_tasks/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import offline

from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config

TASKS = "tasks:shell?size=40&seed=0&agent=terminus&max_steps=1"
HELD_OUT = "tasks:shell?size=40&seed=1"
SETTINGS = {
    "num_steps": 18,
    "tasks_per_step": 8,
    "rollout": {"group_size": 4, "max_tokens": 40, "max_concurrent": 16},
    "optim": {"lr": 1e-3, "schedule": "linear"},
    "eval": {"every": 6},
    "save_every": 0,
}


def main(settings: list[str]) -> None:
    """Train on 40 tasks in sandboxes of bubblewrap, and print how many of 40 others are solved."""
    config = load_config(None, settings)
    if not config.model.path:
        config = load_config({**SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    result = AgentTrainer(env=TASKS, val_dataset=HELD_OUT, config=config).train()
    first, *_, last = result.evaluations
    print(f"held-out tasks solved: {first['eval/accuracy']:.0%} -> {last['eval/accuracy']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
