"""pass@k and accuracy, with confidence intervals clustered by task.

Rollouts of one task resemble each other, so n rollouts of m tasks are not n * m independent trials: the random draw
is the *task*. The standard error is therefore clustered by task (Miller 2024, arXiv:2411.00640), and the interval is
Wilson's at the sample size that this error corresponds to (Korn & Graubard 1998; Dean & Pagano 2015 compare the
choices): with one rollout of each task, Wilson's interval itself. It stays inside [0, 1], and keeps its width where
every task was solved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rllm.errors import ConfigError, counted
from rllm.store.codec import readable_json
from rllm.types import TASK_ID_FIELDS, Trajectory

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: intervals cover 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A rate with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    num_tasks: int
    """Number of tasks averaged."""

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k rollouts is correct (Chen et al. 2021, arXiv:2107.03374).

    It is `1 - C(n - c, k) / C(n, k)`: the share of all choices of k among n rollouts that hold a correct one.
    """
    if not 0 <= num_correct <= num_rollouts:
        raise ConfigError(f"num_correct={num_correct}: of {num_rollouts} rollouts 0 to {num_rollouts} are correct")
    if not 1 <= k <= num_rollouts:
        raise ConfigError(f"k={k}: pass@k of {num_rollouts} rollouts needs 1 <= k <= {num_rollouts}")
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def mean_over_tasks(values: Sequence[float], num_rollouts: int) -> Estimate:
    """Return the mean of one rate per task, with an interval for the population that the tasks come from.

    Args:
        values: rates, at least one.
        num_rollouts: rollouts behind the rates, which bounds the number of independent trials.
    """
    mean = fmean(values)
    size = _effective_size(values, mean, num_rollouts)
    centre = (mean + Z_95**2 / (2 * size)) / (1 + Z_95**2 / size)
    half = Z_95 / (1 + Z_95**2 / size) * math.sqrt(mean * (1 - mean) / size + Z_95**2 / (4 * size**2))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(value=mean, low=min(low, mean), high=max(high, mean), num_tasks=len(values))


def _effective_size(values: Sequence[float], mean: float, num_rollouts: int) -> float:
    """Return the number of independent trials whose mean would be as uncertain as that of these tasks.

    It is at least the number of tasks, since rates between 0 and 1 vary no more than single trials do.
    """
    num_tasks = len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    if num_tasks == 1 or mean in (0.0, 1.0):
        return float(num_tasks)  # nothing shows how much tasks differ, so more rollouts of each add nothing
    if squares == 0.0:
        return float(max(num_tasks, num_rollouts))
    squared_error = squares / (num_tasks - 1) / num_tasks * (t_quantile(num_tasks - 1) / Z_95) ** 2
    return min(max(num_tasks, num_rollouts), max(num_tasks, mean * (1 - mean) / squared_error))


def t_quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, expanded around the normal one (Abramowitz & Stegun 26.7.5, two terms)."""
    return Z_95 + (Z_95**3 + Z_95) / (4 * freedom) + (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * freedom**2)


@dataclass(frozen=True, kw_only=True)
class PassAtK:
    """Result of `compute_pass_at_k`; `str()` gives one line."""

    pass_at_1: float
    """Share of correct rollouts."""
    pass_at_k: float
    """Share of tasks that at least one rollout solved."""
    k: int
    """Largest number of rollouts of one task."""
    num_tasks: int
    num_rollouts: int
    num_unscored: int
    """Rollouts without a reward, which do not count as correct."""

    def __str__(self) -> str:
        unscored = f", {self.num_unscored} of them without a reward" if self.num_unscored else ""
        return (
            f"pass@1 {self.pass_at_1:.1%}, pass@{self.k} {self.pass_at_k:.1%} "
            f"({counted(self.num_tasks, 'task')}, {counted(self.num_rollouts, 'rollout')}{unscored})"
        )


def compute_pass_at_k(results: Sequence[Trajectory]) -> PassAtK:
    """Return pass@1 and pass@k of trajectories of any number of tasks; one is correct if its reward is above 0.

    Trajectories belong to one task if their tasks have the same `task_id` or `id`, or else the same content.

    Raises:
        ConfigError: if there are none, or one is not a trajectory.
    """
    by_task: dict[bytes, list[float | None]] = {}
    for item in results:
        if not isinstance(item, Trajectory):
            raise ConfigError(f"compute_pass_at_k takes trajectories, and this is {type(item).__name__}: {item!r:.80}")
        by_task.setdefault(_task_key(item.task), []).append(item.final_reward())
    if not by_task:
        raise ConfigError("compute_pass_at_k: there are no trajectories")
    correct = {key: sum(1 for reward in rewards if (reward or 0) > 0) for key, rewards in by_task.items()}
    rewards = [reward for of_task in by_task.values() for reward in of_task]
    return PassAtK(
        pass_at_1=sum(correct.values()) / len(rewards),
        pass_at_k=fmean(float(count > 0) for count in correct.values()),
        k=max(map(len, by_task.values())),
        num_tasks=len(by_task),
        num_rollouts=len(rewards),
        num_unscored=sum(reward is None for reward in rewards),
    )


def _task_key(task: object) -> bytes:
    own = task if isinstance(task, Mapping) else {}
    named = next((own[name] for name in TASK_ID_FIELDS if own.get(name) is not None), None)
    return readable_json(task if named is None else {"id": named}, sort_keys=True)
