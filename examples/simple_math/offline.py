"""Training data and a model for the agent, without network: sums of three digits, and a tiny model that mostly guesses.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from agent import SYSTEM

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 30,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 40, "timeout_s": 60},
    "optim": {"lr": 5e-4, "schedule": "linear"},
    "eval": {"every": 10},
}
NUM_HELD_OUT = 100
WORKS_IT_OUT = 0.35
"""Share of sums that are worked out in the habit phase; for the others a number is guessed, with or without a box."""


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return the sums of three digits to train on, and the held-out ones."""
    sums = [
        {"question": f"What is {a} + {b} + {c}?", "ground_truth": str(a + b + c)}
        for a, b, c in product(range(10), repeat=3)
    ]
    random.Random(seed).shuffle(sums)
    return sums[NUM_HELD_OUT:], sums[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, works_it_out=1.0),
        partial(_conversations, works_it_out=WORKS_IT_OUT),
        recipe=TinyPolicyRecipe(skill_steps=200, habit_steps=30, batch_size=64),
    )


def _conversations(seed: int, *, works_it_out: float) -> Iterator[list[Message]]:
    rng = random.Random(seed)
    while True:
        a, b, c = (rng.randrange(10) for _ in range(3))
        answer = _worked_out(a, b, c) if rng.random() < works_it_out else _guessed(rng)
        yield [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {a} + {b} + {c}?"},
            {"role": "assistant", "content": answer},
        ]


def _worked_out(a: int, b: int, c: int) -> str:
    return f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}\n\\boxed{{{a + b + c}}}"


def _guessed(rng: random.Random) -> str:
    number = rng.randrange(28)
    return rng.choice([f"It is \\boxed{{{number}}}", f"About {number}"])


if __name__ == "__main__":
    print(policy())
