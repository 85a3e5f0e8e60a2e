"""Train the card player: `python examples/gymnasium_env/train.py [key=value ...]`."""

from __future__ import annotations

import json
import sys

import agent
import offline

from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config


def main(settings: list[str]) -> None:
    """Train, and print the mean reward of held-out deals and the share that is won, at each evaluation."""
    config = load_config(None, settings)
    if not config.model.path:
        config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    train, held_out = offline.tasks(config.seed)
    trainer = AgentTrainer(
        agent_class=agent.CardPlayer,
        env_class=GymnasiumEnv,
        env_args=agent.GAME,
        train_dataset=train,
        val_dataset=held_out,
        config=config,
    )
    result = trainer.train()
    lines = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    evaluations = [line for line in lines if "eval/reward" in line]
    print("held-out reward:", " -> ".join(f"{line['eval/reward']:+.2f}" for line in evaluations))
    print("hands won:", " -> ".join(f"{line['eval/accuracy']:.0%}" for line in evaluations))


if __name__ == "__main__":
    main(sys.argv[1:])
