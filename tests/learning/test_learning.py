"""Every algorithm improves the tiny policy, by more than chance, with any seed; and chance alone does not."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup

from .alphabet import STARTS_CORRECTLY, conversations, reward, tasks
from .runs import NAMES, NUM_JUDGED, NUM_STEPS, SEEDS, curve_of, keep, train

MARGIN = 4 * math.sqrt(2 * 0.25 / NUM_JUDGED)
"""Four standard errors of the difference of two evaluations, 0.26. A reward is 0 or 1, so its variance is at most a quarter;
chance exceeds this once in thirty thousand tests."""


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_policy_improves(name: str, seed: int, beginner: Path, tmp_path: Path) -> None:
    curve = curve_of(train(name, seed, policy=beginner, run_dir=tmp_path))
    keep(name, seed, curve)
    first, *_, last = curve.values()
    assert last > first + MARGIN
    assert last > (first + 1) / 2, "at least half of the possible improvement"


@dataclass(frozen=True, kw_only=True)
class Coin(Algorithm):
    """Random credits."""

    def credit(self, group: TrajectoryGroup) -> list[float]:
        coin = random.Random(group.group_id)
        return [coin.choice([-1.0, 1.0]) for _ in group.trajectories]


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_does_not_improve_without_rewards(seed: int, beginner: Path, tmp_path: Path) -> None:
    first, *_, last = curve_of(train(f"{__name__}:Coin", seed, policy=beginner, run_dir=tmp_path)).values()
    assert last < first + MARGIN


ICE_POP = [
    *("algorithm.correction=mask", "algorithm.correction_floor=0.5", "algorithm.correction_cap=5"),
    *("tasks_per_step=4", "data.replay=0.8", "data.replay_steps=16", f"eval.every={NUM_STEPS}"),
]
"""IcePop's mask, with four fifths of each batch sampled by the weights of up to 16 steps ago."""


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_masked_policy_improves_from_older_samples(seed: int, beginner: Path, tmp_path: Path) -> None:
    lines = train("grpo", seed, policy=beginner, run_dir=tmp_path, settings=ICE_POP)
    first, last = curve_of(lines).values()
    assert last > first + MARGIN
    assert any(line.get("policy/correction", 1.0) < 0.95 for line in lines), "some tokens are masked"


PATIENT = [
    "num_steps=40",
    "tasks_per_step=16",
    "eval.every=0",
    "optim.num_minibatches=8",
    "critic.lr=3e-3",
    "critic.warmup_steps=40",
]
"""Enough updates to learn that the first letter decides; the policy needs far fewer."""


@pytest.mark.learning
def test_critic_distinguishes_right_from_wrong_beginnings(beginner: Path, tmp_path: Path) -> None:
    lines = train("ppo", 0, policy=beginner, run_dir=tmp_path, settings=PATIENT)
    assert len(set(curve_of(lines).values())) == 1, "the policy is not updated"
    explained = [line["critic/explained_variance"] for line in lines if "critic/explained_variance" in line]
    assert fmean(explained[:4]) < 0.1, "the untrained critic explains nothing"
    assert fmean(explained[-4:]) > 0.25, "knowing the mean reward alone explains nothing"


def test_teacher_has_the_stated_accuracy() -> None:
    rows = {task["question"]: task for split in tasks(seed=0) for task in split}
    text = islice(conversations(0, starts_correctly=STARTS_CORRECTLY), 4000)
    right = fmean(reward(rows[question["content"]], answer["content"]) for question, answer in text)
    assert right == pytest.approx(0.15 + 0.85 / 8, abs=0.03)


def test_held_out_tasks_are_not_trained_on() -> None:
    train_tasks, held_out = tasks(seed=1)
    assert (len(train_tasks), len(held_out)) == (65, 30)
    assert not [task for task in held_out if task in train_tasks]
    assert reward({"answer": "c d e"}, "c d e") == 1.0
    assert reward({"answer": "c d e"}, "d e") == 0.0
