"""Training data and a model for the walker, without network: small lakes, and a tiny model that mostly wanders.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from agent import Walker

from rllm.environments.grid_world import MOVES, GridWorldEnv, num_moves
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

MAX_STEPS = 6
SETTINGS = {
    "num_steps": 30,
    "tasks_per_step": 16,
    "rollout": {"group_size": 8, "max_steps": MAX_STEPS, "max_tokens": 8, "timeout_s": 60},
    "optim": {"lr": 8e-4, "schedule": "linear"},
    "eval": {"every": 10},
}
NUM_TRAIN, NUM_HELD_OUT = 1000, 200
LOOKS = 0.1
"""Share of turns of the habit phase that walk to the goal; the others go anywhere."""


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return lakes to train on, and held-out ones."""
    rng = random.Random(seed)
    lakes = [_lake(rng) for _ in range(NUM_TRAIN + NUM_HELD_OUT)]
    return lakes[NUM_HELD_OUT:], lakes[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_walks, looks=1.0),
        partial(_walks, looks=LOOKS),
        recipe=TinyPolicyRecipe(skill_steps=150, habit_steps=40),
    )


def _lake(rng: random.Random) -> Task:
    return {"seed": rng.randrange(2**31), "size": 3, "p": 0.8, "max_steps": MAX_STEPS}


def _walks(seed: int, *, looks: float) -> Iterator[list[Message]]:
    """Yield walks without end, as the agent would record them."""
    rng = random.Random(seed)
    while True:
        env, walker = GridWorldEnv.from_dict(_lake(rng)), Walker()
        observation, info = env.reset()
        walker.update_from_env(observation, 0.0, False, info)
        done = False
        while not done:
            move = _best(env) if rng.random() < looks else rng.choice(list(MOVES))
            action = walker.update_from_model(move)
            observation, reward, done, info = env.step(action)
            if not done:
                walker.update_from_env(observation, reward, done, info)
        yield walker.chat_completions


def _best(env: GridWorldEnv) -> str:
    """Return the first move of a shortest way to the goal."""

    def distance(move: str) -> float:
        cell = env.grid.move(env.position, MOVES[move])
        moves = None if cell in env.grid.holes else num_moves(replace(env.grid, start=cell), at_most=MAX_STEPS)
        return math.inf if moves is None else moves

    return min(MOVES, key=distance)


if __name__ == "__main__":
    print(policy())
