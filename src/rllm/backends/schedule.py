"""The learning rate of each update: it rises, stays, and falls."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol


class Schedule(Protocol):
    """What decides the learning rate."""

    @property
    def lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def decay(self) -> Literal["linear", "cosine"]: ...


def learning_rate(schedule: Schedule, num_steps: int) -> float:
    """The learning rate of the update that is the `num_steps`-th, counted from 1."""
    rising = min(num_steps / schedule.warmup_steps, 1.0) if schedule.warmup_steps else 1.0
    return schedule.lr * min(rising, _falling(schedule, num_steps))


def decay_steps(config: Any) -> int | None:
    """The policy's updates in the run of a `TrainConfig`, over which its learning rate falls; `None` if it does not."""
    optim = config.optim
    num_steps = config.num_steps - config.critic.warmup_steps  # in which the policy waits
    return None if optim.schedule == "constant" else max(num_steps, 1) * optim.num_minibatches * optim.num_epochs


def _falling(schedule: Schedule, num_steps: int) -> float:
    if not schedule.decay_steps:
        return 1.0
    done = min(max((num_steps - 1) / schedule.decay_steps, 0.0), 1.0)
    return 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
