"""`python -m rllm.data.prepare_arithmetic`: sums, differences and products of chosen difficulty."""

from __future__ import annotations

import random

from rllm.data.dataset import Dataset
from rllm.data.prepare import register_random, run
from rllm.errors import ConfigError
from rllm.types import Task


def prepare(*, train: int = 1000, test: int = 100, seed: int = 0, digits: int = 2, operators: int = 2) -> list[Dataset]:
    """Register `arithmetic`: numbers have up to `digits` digits, and questions up to `operators` of + - and *."""
    for name, value in (("digits", digits), ("operators", operators)):
        if value < 1:
            raise ConfigError(f"{name}={value}: use at least 1")
    return register_random(
        "arithmetic", lambda rng: arithmetic_task(rng, digits, operators), train=train, test=test, seed=seed
    )


def arithmetic_task(rng: random.Random, digits: int, operators: int) -> Task:
    """Return a question of at most this difficulty, with its answer."""
    first = _number(rng, digits)
    steps = [(rng.choice("+-*"), _number(rng, digits)) for _ in range(rng.randint(1, operators))]
    expression = " ".join([str(first), *(f"{operator} {number}" for operator, number in steps)])
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


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** rng.randint(1, digits))


if __name__ == "__main__":
    run(prepare)
