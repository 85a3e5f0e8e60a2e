"""Countdown, arithmetic and the grid world, which are made without a network."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rllm.data import DatasetRegistry, prepare_arithmetic, prepare_countdown, prepare_grid_world
from rllm.data.prepare_arithmetic import value_of
from rllm.environments.grid_world import GridWorldEnv, num_moves
from rllm.errors import ConfigError


def reachable(nums: list[Fraction]) -> Iterator[Fraction]:
    """Every value that can be made of these numbers, each used once."""
    if len(nums) == 1:
        yield nums[0]
    for i, a in enumerate(nums):
        for j, b in enumerate(nums):
            rest = [other for k, other in enumerate(nums) if k not in (i, j)]
            if i < j:
                yield from reachable([*rest, a + b])
                yield from reachable([*rest, a * b])
            if i != j:
                yield from reachable([*rest, a - b])
                if b:
                    yield from reachable([*rest, a / b])


def test_every_countdown_task_can_be_solved(home: Path) -> None:
    train, test = prepare_countdown.prepare(train=8, test=4, seed=3)
    for task in [*train, *test]:
        assert set(task) == {"question", "target", "nums", "ground_truth"}
        assert len(task["nums"]) in (3, 4)
        assert all(1 <= num <= 99 for num in task["nums"])
        assert 10 <= task["target"] <= 100
        assert task["ground_truth"] == str(task["target"])
        assert task["target"] in reachable([Fraction(num) for num in task["nums"]])
    assert list(DatasetRegistry.load_dataset("countdown", "train") or []) == list(train)


def test_numbers_that_reach_no_target_are_drawn_again() -> None:
    rng = random.Random(550382)  # begins with 2, 1 and 2
    assert prepare_countdown.countdown_task(rng)["nums"] == [21, 23, 41, 55]


def test_the_countdown_question_says_it_all() -> None:
    task = prepare_countdown.countdown_task(random.Random(0))
    assert f"equals {task['target']}," in task["question"]
    assert all(str(num) in task["question"] for num in task["nums"])


def test_a_product_binds_before_a_sum() -> None:
    assert value_of(2, []) == 2
    assert value_of(2, [("+", 3), ("*", 4), ("-", 5), ("*", 2)]) == 4
    assert value_of(2, [("*", 3), ("*", 4)]) == 24


def test_arithmetic_is_as_hard_as_wanted(home: Path) -> None:
    train, test = prepare_arithmetic.prepare(train=30, test=10, digits=3, operators=2)
    operators = [sum(row["question"].count(f" {sign} ") for sign in "+-*") for row in [*train, *test]]
    numbers = [word for row in train for word in row["question"].rstrip("?").split() if word.isdecimal()]
    assert set(operators) == {1, 2}
    assert {len(number) for number in numbers} == {1, 2, 3}
    assert all(set(row) == {"question", "ground_truth"} for row in train)
    for row in train:
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == row["ground_truth"]


@pytest.mark.parametrize("is_slippery", [False, True])
def test_every_grid_world_has_a_way(home: Path, is_slippery: bool) -> None:
    train, test = prepare_grid_world.prepare(train=5, test=2, size=5, p=0.6, is_slippery=is_slippery)
    steps = 60 if is_slippery else 20
    assert len({task["seed"] for task in [*train, *test]}) == 7
    for task in [*train, *test]:
        assert task == {"seed": task["seed"], "size": 5, "p": 0.6, "is_slippery": is_slippery, "max_steps": steps}
        assert num_moves(GridWorldEnv.from_dict(task).grid, at_most=steps) is not None


@pytest.mark.parametrize(
    ("prepare", "wrong", "told"),
    [
        (prepare_grid_world.prepare, {"size": 1}, "size=1: use 2 to 64"),
        (prepare_grid_world.prepare, {"p": 1.5}, "p=1.5: use a probability"),
        (prepare_arithmetic.prepare, {"digits": 0}, "digits=0: use at least 1"),
        (prepare_arithmetic.prepare, {"operators": 0}, "operators=0: use at least 1"),
        (prepare_arithmetic.prepare, {"digits": 1, "operators": 1}, "than 300"),
        (prepare_countdown.prepare, {"train": 0}, "train=0: use at least 1 task"),
    ],
)
def test_what_cannot_be_made_is_refused(home: Path, prepare: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        prepare(**wrong)
    assert DatasetRegistry.get_dataset_names() == []
