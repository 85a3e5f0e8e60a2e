"""Training data and a model for both roles, without network: auctions, and a tiny model that mostly guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

from agent import CHECK, PROPOSE, SENT_BACK, conversation

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 16,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 8, "timeout_s": 60},
    "optim": {"lr": 5e-4, "schedule": "linear"},
    "eval": {"every": 8},
}
NUM_BIDS, NUM_HELD_OUT = 4, 200
PROPOSER_READS, CHECKER_READS = 0.05, 0.5
"""Share of tasks of the habit phase in which both roles read all bids; otherwise one guesses, and one agrees."""


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return the auctions of four different bids to train on, and the held-out ones."""
    auctions = list(permutations(range(10), NUM_BIDS))
    random.Random(seed).shuffle(auctions)
    rows = [_auction(bids) for bids in auctions]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, proposer=1.0, checker=1.0),
        partial(_conversations, proposer=PROPOSER_READS, checker=CHECKER_READS),
        recipe=TinyPolicyRecipe(skill_steps=100, habit_steps=30),
    )


def _auction(bids: Sequence[int]) -> Task:
    return {"question": f"Bids: {' '.join(map(str, bids))}", "answer": str(max(bids))}


def _conversations(seed: int, *, proposer: float, checker: float) -> Iterator[list[Message]]:
    """Yield conversations without end, of a proposer and a checker in turn."""
    rng = random.Random(seed)
    while True:
        yield _proposing(rng.sample(range(10), NUM_BIDS), rng, proposer)
        yield _checking(rng.sample(range(10), NUM_BIDS), rng, checker)


def _proposing(bids: Sequence[int], rng: random.Random, reads: float) -> list[Message]:
    first, second = (max(bids) if rng.random() < reads else rng.choice(bids) for _ in range(2))
    talk = [*conversation(PROPOSE, _auction(bids)["question"]), _message(first)]
    return talk if first == max(bids) else [*talk, {"role": "user", "content": SENT_BACK}, _message(second)]


def _checking(bids: Sequence[int], rng: random.Random, reads: float) -> list[Message]:
    answer = rng.choice([max(bids), *bids])
    verdict = "yes" if answer == max(bids) or rng.random() >= reads else "no"
    return [*conversation(CHECK, f"{_auction(bids)['question']}. Answer: {answer}"), _message(verdict)]


def _message(answer: object) -> Message:
    return {"role": "assistant", "content": str(answer)}
