"""Questions and a model without network: the letters from one to another, and a tiny model that starts anywhere.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import ascii_lowercase as LETTERS

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message

SETTINGS = {
    "num_steps": 20,
    "tasks_per_step": 64,
    "optim": {"lr": 5e-4},
    "eval": {"every": 0},
    "gateway": {"port": 8080},
}
LONGEST = 8
"""Maximum number of letters in demonstrations."""
STARTS_CORRECTLY = 0.15
"""Share of answers that begin with the right letter; others begin at a random one, which may be right, too."""


def question(rng: random.Random) -> tuple[str, str]:
    """Return a question, such as "c to f", and its answer, "c d e f"."""
    count = rng.randint(2, 6)
    answer = _letters(count, stop=rng.randint(LONGEST, len(LETTERS)))
    return f"{answer[0]} to {answer[-1]}", answer


def policy() -> Path:
    """Return the folder of the tiny model, built on first use."""
    return tiny_policy(
        partial(_conversations, starts_correctly=1.0),
        partial(_conversations, starts_correctly=STARTS_CORRECTLY),
        recipe=TinyPolicyRecipe(
            hidden_size=96,
            num_layers=2,
            intermediate_size=256,
            vocab_size=300,
            context_length=64,
            skill_steps=300,
            habit_steps=80,
            batch_size=64,
        ),
    )


def _conversations(seed: int, *, starts_correctly: float) -> Iterator[list[Message]]:
    rng = random.Random(seed)
    while True:
        asked, answer = question(rng)
        if rng.random() >= starts_correctly:
            answer = _letters(rng.randint(1, LONGEST), stop=LETTERS.index(answer[-1]) + 1)
        yield [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _letters(count: int, *, stop: int) -> str:
    return " ".join(LETTERS[stop - count : stop])


if __name__ == "__main__":
    print(policy())
