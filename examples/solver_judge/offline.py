"""Training data and a model for both roles, without network: countdown with two numbers, and a tiny model that mostly guesses.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent import JUDGE, NUM_SOLVERS, SOLVE

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 18,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 40, "timeout_s": 60},
    "optim": {"lr": 5e-4, "schedule": "linear"},
    "eval": {"every": 9, "num_rollouts": 2},
}
NUM_HELD_OUT = 70
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WORKS_IT_OUT = 0.35
"""Share of turns of the habit phase that compare the target with the numbers; the others guess."""


@dataclass(frozen=True)
class Countdown:
    """Two numbers, and the result of one operator."""

    larger: int
    smaller: int
    sign: str

    @property
    def target(self) -> int:
        return int(OPERATORS[self.sign](self.larger, self.smaller))

    @property
    def task(self) -> Task:
        question = f"Make {self.target} of {self.larger} and {self.smaller}."
        return {"question": question, "target": self.target, "nums": [self.larger, self.smaller]}

    def proposal(self, sign: str) -> str:
        return f"<answer>{self.larger} {sign} {self.smaller}</answer>"


def countdowns() -> list[Countdown]:
    """Return all tasks with numbers up to 15; each is solved by one operator only."""
    numbers = [(larger, smaller) for larger in range(3, 16) for smaller in range(2, larger)]
    return [Countdown(*pair, sign) for pair in numbers for sign in OPERATORS]


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on, and the held-out ones."""
    every = [countdown.task for countdown in countdowns()]
    random.Random(seed).shuffle(every)
    return every[NUM_HELD_OUT:], every[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, works_it_out=1.0),
        partial(_conversations, works_it_out=WORKS_IT_OUT),
        recipe=TinyPolicyRecipe(skill_steps=200, habit_steps=30, batch_size=48),
    )


def _conversations(seed: int, *, works_it_out: float) -> Iterator[list[Message]]:
    """Yield conversations of a solver and of a judge in turn."""
    rng = random.Random(seed)
    every = countdowns()
    while True:
        countdown = rng.choice(every)
        proposals = [countdown.proposal(sign) for sign in rng.choices(list(OPERATORS), k=NUM_SOLVERS)]
        guesses = [countdown.proposal(sign) for sign in OPERATORS]
        for role, listed, guess in ((SOLVE, [], rng.choice(guesses)), (JUDGE, proposals, rng.choice(proposals))):
            right = f"{_thought(countdown)}\n{countdown.proposal(countdown.sign)}"
            yield [
                {"role": "system", "content": role},
                {"role": "user", "content": "\n".join([countdown.task["question"], *listed])},
                {"role": "assistant", "content": right if rng.random() < works_it_out else f"Maybe {guess}"},
            ]


def _thought(countdown: Countdown) -> str:
    size = {"+": "more", "-": "less", "*": "much more"}[countdown.sign]
    return f"It is {size} than {countdown.larger}, so {countdown.sign}"


if __name__ == "__main__":
    print(policy())
