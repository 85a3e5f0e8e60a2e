"""Order of training tasks: a pure function of seed and step, so that there is no loader state to save."""

from __future__ import annotations

import random
from functools import lru_cache


def tasks_of_step(step: int, *, num_tasks: int, per_step: int, seed: int) -> list[int]:
    """Return the row numbers of a step. Every task comes once in each epoch, in a new order."""
    first = step * per_step
    return [_order(seed, place // num_tasks, num_tasks)[place % num_tasks] for place in range(first, first + per_step)]


def more_tasks_of_step(step: int, *, num_tasks: int, per_step: int, num_drawn: int, count: int, seed: int) -> list[int]:
    """Return the row numbers of `count` more tasks for a step that has drawn `num_drawn` additional ones already.

    They differ from these and from the step's own tasks if there are enough.
    """
    own = set(tasks_of_step(step, num_tasks=num_tasks, per_step=per_step, seed=seed))
    others = [row for row in range(num_tasks) if row not in own] or sorted(own)
    random.Random(f"{seed}:{step}").shuffle(others)
    return [others[place % len(others)] for place in range(num_drawn, num_drawn + count)]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_tasks: int) -> list[int]:
    order = list(range(num_tasks))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
