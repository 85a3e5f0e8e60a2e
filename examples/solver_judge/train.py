"""Train solvers and judge: `python examples/solver_judge/train.py [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import nan
from statistics import fmean

import agent
import offline

from rllm.data.prepare import prepare_countdown
from rllm.tracking.base import Tracker
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.types import Episode


def main(settings: list[str]) -> None:
    """Train, and print what each role earns on held-out tasks before and after."""
    config = load_config(None, settings)
    if config.model.path:
        train, held_out = prepare_countdown(seed=config.seed)
    else:
        config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
        train, held_out = offline.tasks(config.seed)
    roles = RewardByRole()
    trainer = AgentTrainer(
        agent_run_func=agent.solve_and_judge,
        train_dataset=train,
        val_dataset=held_out,
        config=config,
        trackers=[roles],
    )
    trainer.train()
    before, after = roles.evaluations[0], roles.evaluations[-1]
    for role in before:
        print(f"held-out reward of the {role}: {before[role]:.0%} -> {after[role]:.0%}")


class RewardByRole(Tracker):
    """Tracker that keeps the mean rewards of both roles for each evaluation."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        if split == "eval":
            self.evaluations.append(rewards_by_role(episodes))


def rewards_by_role(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean rewards; the judge's also over the rollouts in which a solver was right, so that it could be, too."""
    solver, judge, judge_of_right = [], [], []
    for *solvers, judged in (episode.trajectories for episode in episodes if not episode.failed):
        solver += [trajectory.reward for trajectory in solvers]
        judge.append(judged.reward)
        if any(trajectory.reward for trajectory in solvers):
            judge_of_right.append(judged.reward)
    return {
        "solver": fmean(solver),
        "judge": fmean(judge),
        "judge, where a solver is right": fmean(judge_of_right or [nan]),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
