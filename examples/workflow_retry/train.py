"""Train the proposer and the checker: `python examples/workflow_retry/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import agent
import offline

from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config


def main(settings: list[str]) -> None:
    """Train, and print the share of held-out questions that are answered correctly, at each evaluation."""
    config = load_config(None, settings)
    if not config.model.path:
        config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    train, held_out = offline.tasks(config.seed)
    trainer = AgentTrainer(
        workflow_class=agent.ProposeAndCheck,
        workflow_args={"max_tries": 2},
        train_dataset=train,
        val_dataset=held_out,
        config=config,
    )
    result = trainer.train()
    print("held-out accuracy:", " -> ".join(f"{metrics['eval/accuracy']:.0%}" for metrics in result.evaluations))


if __name__ == "__main__":
    main(sys.argv[1:])
