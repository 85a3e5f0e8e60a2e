"""Train the walker: `python examples/grid_world/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import agent
import offline

from rllm.environments.grid_world import GridWorldEnv
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config


def main(settings: list[str]) -> None:
    """Train, and print the share of held-out lakes that are crossed, at each evaluation."""
    config = load_config(None, settings)
    if not config.model.path:
        config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    train, held_out = offline.tasks(config.seed)
    trainer = AgentTrainer(
        agent_class=agent.Walker,
        env_class=GridWorldEnv,
        train_dataset=train,
        val_dataset=held_out,
        config=config,
    )
    result = trainer.train()
    print("held-out accuracy:", " -> ".join(f"{metrics['eval/accuracy']:.0%}" for metrics in result.evaluations))


if __name__ == "__main__":
    main(sys.argv[1:])
