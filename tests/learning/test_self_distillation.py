"""A policy that can follow an example, but rarely answers correctly without one, learns to from its own scores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rllm.testing.tiny_policy import tiny_policy
from rllm.types import Message

from .alphabet import RECIPE, STARTS_CORRECTLY, conversations
from .runs import SEEDS, curve_of, train
from .test_learning import MARGIN

INSTRUCTION = "like"


def _both(seed: int, *, starts_correctly: float) -> Iterator[list[Message]]:
    """Yield conversations without an example, and as many with one, whose answer is correct."""
    rng = random.Random(seed)
    plain, right = conversations(seed, starts_correctly=starts_correctly), conversations(seed + 1, starts_correctly=1.0)
    while True:
        if rng.random() < 0.5:
            yield next(plain)
        else:
            question, answer = next(right)
            yield [{"role": "user", "content": f"{INSTRUCTION}\n\n{answer['content']}"}, question, answer]


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_learns_from_examples_without_rewards(seed: int, tmp_path: Path) -> None:
    beginner = tiny_policy(
        partial(_both, starts_correctly=1.0),
        partial(_both, starts_correctly=STARTS_CORRECTLY),
        recipe=replace(RECIPE, context_length=96),
    )
    shown = ["algorithm.demonstration=answer", f"algorithm.instruction={INSTRUCTION}"]
    first, *_, last = curve_of(train("sdft", seed, policy=beginner, run_dir=tmp_path, settings=shown)).values()
    assert last > first + MARGIN
