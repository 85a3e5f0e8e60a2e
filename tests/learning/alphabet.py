"""Task of every algorithm: list the letters from one to another. A tiny policy mostly starts with a wrong letter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import ascii_lowercase as LETTERS

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

RECIPE = TinyPolicyRecipe(
    hidden_size=96,
    num_layers=2,
    intermediate_size=256,
    vocab_size=300,
    context_length=64,
    skill_steps=300,
    habit_steps=80,
    batch_size=64,
)
LONGEST = 8
"""Maximum number of letters in demonstrations."""
STARTS_CORRECTLY = 0.15
"""Fraction of demonstrations that begin with the right letter; the others begin anywhere, an eighth of the time correctly."""
NUM_HELD_OUT = 30


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return stretches of two to six letters for training, and held-out ones."""
    rows = _all_tasks()
    random.Random(seed).shuffle(rows)
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def reward(task: Task, answer: str) -> float:
    """Return 1 for exactly these letters."""
    return float(answer == task["answer"])


def policy() -> Path:
    """Return the folder of the policy, built on first use."""
    return tiny_policy(
        partial(conversations, starts_correctly=1.0),
        partial(conversations, starts_correctly=STARTS_CORRECTLY),
        recipe=RECIPE,
    )


def conversations(seed: int, *, starts_correctly: float) -> Iterator[list[Message]]:
    """Yield demonstrations without end, which always stop correctly."""
    rng = random.Random(seed)
    rows = _all_tasks()
    while True:
        task = rng.choice(rows)
        answer = task["answer"]
        if rng.random() >= starts_correctly:
            answer = _letters(rng.randint(1, LONGEST), stop=LETTERS.index(answer[-1]) + 1)
        yield [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": answer}]


def _all_tasks() -> list[Task]:
    answers = [_letters(count, stop=stop) for stop in range(LONGEST, len(LETTERS) + 1) for count in range(2, 7)]
    return [{"question": f"{answer[0]} to {answer[-1]}", "answer": answer} for answer in answers]


def _letters(count: int, *, stop: int) -> str:
    """Return the last `count` letters before this position in the alphabet."""
    return " ".join(LETTERS[stop - count : stop])
