"""Train proposer and checker: `python examples/autogen_team/train.py [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

import agent
import offline

from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.types import Episode


def main(settings: list[str]) -> None:
    """Train, and print what each role earns on held-out tasks before and after."""
    config = load_config(offline.SETTINGS, settings)
    if not config.model.path:
        config.model.path = str(offline.policy())
    train, held_out = offline.tasks(config.seed)
    roles = RewardByRole()
    trainer = AgentTrainer(
        agent_run_func=agent.propose_and_check,
        train_dataset=train,
        val_dataset=held_out,
        config=config,
        trackers=[roles],
    )
    trainer.train()
    before, after = roles.evaluations[0], roles.evaluations[-1]
    for role in before:
        print(f"held-out reward of the {role}: {before[role]:.0%} -> {after[role]:.0%}")


class RewardByRole:
    """A tracker that keeps, for each evaluation, the mean rewards of both roles."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        if split == "eval":
            self.evaluations.append(rewards_by_role(episodes))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the configured trackers show the metrics."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def rewards_by_role(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean reward of each role over the episodes that did not fail."""
    rewards: dict[str, list[float]] = {"proposer": [], "checker": []}
    for trajectory in (trajectory for episode in episodes if not episode.failed for trajectory in episode.trajectories):
        rewards[trajectory.name].append(trajectory.final_reward() or 0.0)
    return {role: fmean(earned) for role, earned in rewards.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
