"""`python -m rllm.data.prepare_countdown`: reach a number by arithmetic with some others."""

from __future__ import annotations

import random

from rllm.data.dataset import Dataset
from rllm.data.prepare import register_random, run
from rllm.types import Task

_TARGETS = range(10, 101)


def prepare(*, train: int = 1000, test: int = 100, seed: int = 0) -> list[Dataset]:
    """Register `countdown`: tasks of three or four numbers, each of which can be solved."""
    return register_random("countdown", countdown_task, train=train, test=test, seed=seed)


def countdown_task(rng: random.Random) -> Task:
    """Return a task whose target is computed from its numbers, each used once, so that it has a solution."""
    target = 0
    while target not in _TARGETS:  # new numbers each time: three ones, for example, cannot reach a target
        nums = sorted(rng.randint(1, 99) for _ in range(rng.choice((3, 4))))
        target = _combined(nums, rng)
    listed = f"{', '.join(map(str, nums[:-1]))} and {nums[-1]}"
    question = (
        f"Write an expression that equals {target}, with the numbers {listed}, each exactly once, "
        "and any of + - * / and parentheses."
    )
    return {"question": question, "target": target, "nums": nums, "ground_truth": str(target)}


def _combined(nums: list[int], rng: random.Random) -> int:
    """Replace two of the numbers by their sum, difference, product or quotient, until one is left, and return it."""
    left = list(nums)
    while len(left) > 1:
        a, b = sorted((left.pop(rng.randrange(len(left))) for _ in range(2)), reverse=True)
        results = [a + b, a - b, a * b]
        if b and a % b == 0:
            results.append(a // b)
        left.append(rng.choice(results))
    return left[0]


if __name__ == "__main__":
    run(prepare)
