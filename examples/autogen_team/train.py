"""Train proposer and checker: `python examples/autogen_team/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import agent
import offline

from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config


def main(settings: list[str]) -> None:
    """Train, and print what each role earns on held-out tasks before and after."""
    config = load_config(offline.SETTINGS, settings)
    if not config.model.path:
        config.model.path = str(offline.policy())
    train, held_out = offline.tasks(config.seed)
    trainer = AgentTrainer(
        agent_run_func=agent.propose_and_check,
        train_dataset=train,
        val_dataset=held_out,
        config=config,
    )
    first, *_, last = trainer.train().evaluations
    for role in ("proposer", "checker"):
        print(f"held-out reward of the {role}: {first[f'eval/reward/{role}']:.0%} -> {last[f'eval/reward/{role}']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
