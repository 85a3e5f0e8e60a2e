"""The learning rate of each update: it rises in the warm-up, and stays or falls from then on."""

from __future__ import annotations

import math
from typing import Literal, Protocol

from rllm.config.schema import TrainConfig
from rllm.config.step_sizes import num_updates


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
    """The learning rate of the update that is the `num_steps`-th, counted from 1; 0 is before the first."""
    if num_steps < schedule.warmup_steps:
        return schedule.lr * num_steps / schedule.warmup_steps
    return schedule.lr * _falling(schedule, num_steps - schedule.warmup_steps)


def decay_steps(config: TrainConfig) -> int | None:
    """After how many updates of the policy its learning rate has fallen, for a `TrainConfig`; `None` if it does not fall."""
    return None if config.optim.schedule == "constant" else num_updates(config)


def _falling(schedule: Schedule, num_steps: int) -> float:
    """Of the update that is the `num_steps`-th after the warm-up, counted from 1."""
    if not schedule.decay_steps:
        return 1.0
    done = min(max(num_steps - 1, 0) / max(schedule.decay_steps - schedule.warmup_steps, 1), 1.0)
    return 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
