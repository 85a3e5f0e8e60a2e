"""Training data and a model for the team, without network: countdown with two numbers, and a tiny model that mostly guesses.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roles import AGREED, CHECK, PROPOSE, is_right

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 24,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 40, "timeout_s": 60},
    # With 5e-4 the checker may learn within three steps to answer nothing but NO, which is mostly right at first.
    "optim": {"lr": 2e-4, "schedule": "linear"},
    "eval": {"every": 8},
}
NUM_HELD_OUT = 70
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WORKS_IT_OUT = 0.15
"""Share of turns of the habit phase that compare the target with the numbers; the others guess."""


@dataclass(frozen=True)
class Countdown:
    """Two numbers, and the result of one operator."""

    larger: int
    smaller: int
    sign: str

    @property
    def task(self) -> Task:
        target = OPERATORS[self.sign](self.larger, self.smaller)
        question = f"Make {target} of {self.larger} and {self.smaller}."
        return {"question": question, "target": target, "nums": [self.larger, self.smaller]}

    def answer(self, sign: str) -> str:
        return f"<answer>{self.larger} {sign} {self.smaller}</answer>"

    @property
    def thought(self) -> str:
        size = {"+": "more", "-": "less", "*": "much more"}[self.sign]
        return f"It is {size} than {self.larger}, so {self.sign}"


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
    """Return the folder of the tiny model, built on first use."""
    return tiny_policy(
        partial(_conversations, works_it_out=1.0),
        partial(_conversations, works_it_out=WORKS_IT_OUT),
        # Enough steps for the habit to settle: with fewer, processors that round differently end far apart.
        recipe=TinyPolicyRecipe(skill_steps=200, habit_steps=60, batch_size=48),
    )


def _conversations(seed: int, *, works_it_out: float) -> Iterator[list[Message]]:
    """Yield conversations of a team, from the proposer's side and from the checker's in turn; half of them have two rounds."""
    rng = random.Random(seed)
    every = countdowns()
    while True:
        countdown = rng.choice(every)
        proposer: list[Message] = [_of("system", PROPOSE), _of("user", countdown.task["question"])]
        checker: list[Message] = [_of("system", CHECK), _of("user", countdown.task["question"])]
        for _ in range(rng.randint(1, 2)):
            proposal = _proposal(countdown, rng, works_it_out)
            verdict = _verdict(countdown, proposal, rng, works_it_out)
            proposer += [_of("assistant", proposal), _of("user", verdict)]
            checker += [_of("user", proposal), _of("assistant", verdict)]
        yield proposer[:-1]
        yield checker


def _of(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _proposal(countdown: Countdown, rng: random.Random, works_it_out: float) -> str:
    if rng.random() < works_it_out:
        return f"{countdown.thought}\n{countdown.answer(countdown.sign)}"
    return f"Maybe {countdown.answer(rng.choice(list(OPERATORS)))}"


def _verdict(countdown: Countdown, proposal: str, rng: random.Random, works_it_out: float) -> str:
    if rng.random() < works_it_out:
        return f"{countdown.thought}\n{AGREED if is_right(proposal, countdown.task) else 'NO'}"
    return f"Maybe {rng.choice([AGREED, 'NO'])}"


if __name__ == "__main__":
    print(policy())
