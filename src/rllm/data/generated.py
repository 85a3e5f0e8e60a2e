"""Random tasks with known answers: arithmetic, countdown, and maps of a grid world."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from rllm.errors import ConfigError
from rllm.types import Task

_MOST_REPEATS = 1000
"""Draws without a new task after which there are hardly any left."""
_TARGETS = range(10, 101)


def arithmetic_task(rng: random.Random, *, digits: int = 2, operators: int = 2) -> Task:
    """Return a question about numbers of up to `digits` digits, with up to `operators` of + - and *."""

    def number() -> int:
        return rng.randrange(10 ** rng.randint(1, digits))

    first = number()
    steps = [(rng.choice("+-*"), number()) for _ in range(rng.randint(1, operators))]
    expression = " ".join([str(first), *(f"{operator} {operand}" for operator, operand in steps)])
    return {"question": f"What is {expression}?", "ground_truth": str(value_of(first, steps))}


def value_of(first: int, steps: list[tuple[str, int]]) -> int:
    """Return the value of `first` followed by operators and numbers; products bind first."""
    terms = [first]
    for operator, number in steps:
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


def countdown_task(rng: random.Random) -> Task:
    """Return a task whose target is computed from its numbers, each used once, so that it has a solution."""
    target = 0
    while target not in _TARGETS:  # new numbers each time: three ones, for example, cannot reach a target
        nums = sorted(rng.randint(1, 99) for _ in range(rng.choice((3, 4))))
        left = list(nums)
        while len(left) > 1:
            a, b = sorted((left.pop(rng.randrange(len(left))) for _ in range(2)), reverse=True)
            results = [a + b, a - b, a * b]
            if b and a % b == 0:
                results.append(a // b)
            left.append(rng.choice(results))
        [target] = left
    listed = f"{', '.join(map(str, nums[:-1]))} and {nums[-1]}"
    question = (
        f"Write an expression that equals {target}, with the numbers {listed}, each exactly once, "
        "and any of + - * / and parentheses."
    )
    return {"question": question, "target": target, "nums": nums, "ground_truth": str(target)}


def distinct_tasks(make: Callable[[random.Random], Task], count: int, *, seed: int) -> list[Task]:
    """Return `count` distinct tasks, the same for the same seed; the first ones do not depend on `count`.

    Raises:
        ConfigError: if there seem to be fewer.
    """
    rng = random.Random(seed)
    tasks: dict[str, Task] = {}
    repeats = 0
    while len(tasks) < count:
        task = make(rng)
        repeats = 0 if tasks.setdefault(json.dumps(task), task) is task else repeats + 1
        if repeats == _MOST_REPEATS:
            raise ConfigError(f"{count} tasks requested, but hardly more than {len(tasks)} of them differ: use fewer")
    return list(tasks.values())
