"""Training data and a model for the player, without network: hands to play, and a tiny model that plays at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from agent import GAME, CardPlayer

from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 30,
    "tasks_per_step": 64,
    "rollout": {"group_size": 8, "max_steps": 10, "max_tokens": 8, "timeout_s": 60},
    "optim": {"lr": 3e-4, "schedule": "linear"},
    "eval": {"every": 10},
}
NUM_TRAIN, NUM_HELD_OUT = 2000, 1000
KEEPS_TO_THE_BOOK = 0.5
"""Share of turns of the habit phase that decide by the hand; the others take another card."""

Choice = Callable[[str, random.Random], str]
"""The player's answer for each hand, as the agent sees it."""


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return deals to train on, and held-out ones. The seed of a task shuffles its cards."""
    deals = random.Random(seed).sample(range(2**31), NUM_TRAIN + NUM_HELD_OUT)
    rows = [{"seed": deal} for deal in deals]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_hands, _by_the_book),
        partial(_hands, _at_random),
        recipe=TinyPolicyRecipe(skill_steps=100, habit_steps=30),
    )


def _hands(choose: Choice, seed: int) -> Iterator[list[Message]]:
    """Yield hands without end, as the agent would record them."""
    rng = random.Random(seed)
    while True:
        env, player = GymnasiumEnv.from_dict({**GAME, "seed": rng.randrange(2**31)}), CardPlayer()
        observation, info = env.reset()
        done = False
        while not done:
            player.update_from_env(observation, 0.0, False, info)
            action = player.update_from_model(choose(observation, rng))
            observation, _, done, info = env.step(action)
        env.close()
        yield player.chat_completions


def _at_random(hand: str, rng: random.Random) -> str:
    return _by_the_book(hand, rng) if rng.random() < KEEPS_TO_THE_BOOK else "hit"


def _by_the_book(hand: str, rng: random.Random) -> str:
    """Return a move close to basic strategy: stick on soft 18, on 17, and on 13 if the dealer is likely to bust."""
    *soft, total, _, dealer = hand.split()
    stick_at = 18 if soft else 13 if 2 <= int(dealer) <= 6 else 17
    return "stick" if int(total) >= stick_at else "hit"
