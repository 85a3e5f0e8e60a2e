"""Train the maths agent: `python examples/simple_math/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import agent
import offline

from rllm.data.prepare import prepare_arithmetic
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config


def main(settings: list[str]) -> None:
    """Train, and print the accuracy on held-out questions before and after."""
    config = load_config(None, settings)
    if config.model.path:
        train, held_out = prepare_arithmetic(seed=config.seed)
    else:
        config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
        train, held_out = offline.tasks(config.seed)
    trainer = AgentTrainer(agent_run_func=agent.solve, train_dataset=train, val_dataset=held_out, config=config)
    result = trainer.train()
    before, *_, after = [metrics["eval/accuracy"] for metrics in result.evaluations]
    print(f"held-out accuracy: {before:.0%} -> {after:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
