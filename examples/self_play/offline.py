"""A tiny model that plays Nim by the rules, and at random; built on first use, without network.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rllm.environments.textarena import Game
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message

PILES = (1, 3)
RECIPE = TinyPolicyRecipe(
    hidden_size=64,
    num_layers=2,
    intermediate_size=192,
    vocab_size=360,
    context_length=1024,
    skill_steps=200,
    habit_steps=60,
    batch_size=16,
)


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(partial(games, plays_well=0.5), partial(games, plays_well=0.0), recipe=RECIPE)


def games(seed: int, *, plays_well: float) -> Iterator[list[Message]]:
    """Yield conversations of either player, game after game."""
    rng = random.Random(seed)
    while True:
        game = Game(game="Nim-v0-raw", options={"piles": list(PILES)}, num_players=2, seed=0)
        piles = list(PILES)
        seats: list[list[Message]] = [[], []]
        while not game.done:
            player, observed = game.observe()
            pile, count = _move(piles, rng, plays_well)
            piles[pile] -= count
            answer = f"[{pile} {count}]"
            seats[player] += [
                {"role": "user", "content": "\n".join(observed)},
                {"role": "assistant", "content": answer},
            ]
            game.move(answer)
        yield from filter(None, seats)


def _move(piles: list[int], rng: random.Random, plays_well: float) -> tuple[int, int]:
    """Return a pile and how many to take from it: at random, or if possible so that the piles' exclusive or becomes 0."""
    moves = [(pile, count) for pile, size in enumerate(piles) for count in range(1, size + 1)]
    xor = 0
    for size in piles:
        xor ^= size
    best = [(pile, count) for pile, count in moves if xor ^ piles[pile] ^ (piles[pile] - count) == 0]
    return rng.choice(best if best and rng.random() < plays_well else moves)


if __name__ == "__main__":
    print(policy())
