"""Sampling of training tasks: the tasks of a step are a pure function of seed, step and the outcomes of earlier steps.

So there is no loader to save: a resumed run with the same recorded outcomes takes the same tasks.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from rllm.config.schema import DataConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, PluginError, RLLMError, counted, raised, shown
from rllm.registry import resolve
from rllm.types import Task

logger = logging.getLogger(__name__)

SamplingFunction: TypeAlias = Callable[[Sequence[Task], Sequence[float | None], int], Sequence[float]]
"""Function of the tasks, their success rates (None before a task was rolled out) and the number of steps done. It
returns a weight of at least 0 for each task; a weight of 0 excludes the task."""
Record: TypeAlias = tuple[int, float]
"""Training step, and the success rate that a task had in it."""

UNIFORM = "uniform"
SAMPLINGS = {
    UNIFORM: "rllm.data.sampling:uniform",
    "difficulty": "rllm.data.sampling:by_difficulty",
    "easy_first": "rllm.data.sampling:easy_first",
}
"""Values of `data.sampling`."""
_MIN_WEIGHT = 0.05
"""Weight of tasks with nothing to learn now: they are still sampled, since that changes with the policy."""


def uniform(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    """Return equal weights: every task comes once in each epoch."""
    return [1.0] * len(tasks)


def by_difficulty(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    """Return 4p(1 - p) for the success rate p, and at least 0.05; tasks without a rate weigh 1.

    This is the variance of success, the most at p = 0.5: rollouts that all succeed or all fail teach nothing
    (Foster et al. 2025, arXiv:2502.12272).
    """
    return [1.0 if rate is None else max(4.0 * rate * (1.0 - rate), _MIN_WEIGHT) for rate in rates]


def easy_first(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    """Return 0.05 ** (1 - p) for the success rate p, and 0.05 once p is 1; tasks without a rate count as p = 0.5.

    The easiest tasks that are not solved yet come first, and harder ones as they are solved (curriculum learning;
    Bengio et al. 2009).
    """
    known = [0.5 if rate is None else rate for rate in rates]
    return [_MIN_WEIGHT ** (1.0 - rate) if rate < 1.0 else _MIN_WEIGHT for rate in known]


class TaskSampler:
    """Chooses the tasks of training steps, and records their success rates."""

    def __init__(
        self,
        data: Dataset,
        settings: DataConfig,
        *,
        seed: int,
        per_step: int,
        delay: int = 0,
        records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        """Check the settings.

        Args:
            data: training tasks, of one source or several.
            settings: weights of the sources, and way of sampling.
            seed: seed of the run.
            per_step: tasks of a step.
            delay: steps by which rollouts may run ahead of updates; a step sees the outcomes of the steps that were
                done when its rollouts could begin at the earliest, so that timing has no influence.
            records: `records` of the sampler that this one continues.

        Raises:
            ConfigError: if the weights do not match the sources, or the way of sampling is not known.
        """
        self._data, self._settings = data, settings
        self._seed, self._per_step, self._delay = seed, per_step, delay
        self._weights = _checked_weights(settings.weights, data.sources)
        self._parts = [list(range(len(data)))] if self._weights is None else list(data.rows_by_source().values())
        self._weigh: SamplingFunction = resolve(settings.sampling, SAMPLINGS, kind="data.sampling")
        self._ids = [] if self._is_uniform else [data.task_id(row) for row in range(len(data))]
        self._records = {task_id: [(step, rate) for step, rate in found] for task_id, found in (records or {}).items()}

    @property
    def _is_uniform(self) -> bool:
        return self._settings.sampling == UNIFORM

    @property
    def records(self) -> dict[str, list[Record]]:
        """Success rates that later steps may need, by task id, oldest first; as JSON for a checkpoint."""
        return {task_id: list(found) for task_id, found in self._records.items()}

    def record(self, step: int, rates: Mapping[str, float]) -> None:
        """Record the success rates of the tasks of a step by task id; uniform sampling needs none."""
        if self._is_uniform:
            return
        for task_id, rate in rates.items():
            found = self._records.setdefault(task_id, [])
            found.append((step, rate))
            # Steps from `step` + 1 on, which are still to be sampled, look back to `step` - `delay` at least.
            while len(found) > 1 and found[1][0] <= step - self._delay:
                found.pop(0)

    def tasks_of_step(self, step: int) -> list[int]:
        """Return the row numbers of the tasks of a step, counted from 0.

        Raises:
            ConfigError: if a sampling function returns anything but a weight for each task.
            PluginError: if it raises.
        """
        weights = self._weights_before(step)
        shares = self._weights or [1.0]
        first, last = (apportioned(number * self._per_step, shares) for number in (step, step + 1))
        rows: list[int] = []
        for part, start, stop in zip(self._parts, first, last, strict=True):
            if weights is None:
                places = (
                    _order(self._seed, place // len(part), len(part))[place % len(part)] for place in range(start, stop)
                )
                rows += [part[place] for place in places]
            else:
                rows += _drawn(part, weights, stop - start, f"{self._seed}:{step}")
        if len(self._parts) > 1:
            random.Random(f"{self._seed}:{step}").shuffle(rows)
        return rows

    def more_tasks_of_step(self, step: int, *, num_drawn: int, count: int) -> list[int]:
        """Return the row numbers of `count` more tasks for a step that has drawn `num_drawn` additional ones already.

        They differ from these and from the step's own tasks if there are enough.
        """
        own, seed = set(self.tasks_of_step(step)), f"{self._seed}:{step}"
        weights = self._weights_before(step)
        if self._weights is not None:
            weights = weights or [1.0] * len(self._data)
            for part, weight in zip(self._parts, self._weights, strict=True):
                for row in part:
                    weights[row] *= weight / len(part)
        possible = [row for row in range(len(self._data)) if weights is None or weights[row] > 0]
        others = [row for row in possible if row not in own] or sorted(own)
        if weights is None:
            random.Random(seed).shuffle(others)
        else:
            others = _drawn(others, weights, len(others), f"{seed}:more")
        return [others[place % len(others)] for place in range(num_drawn, num_drawn + count)]

    def warn_of_missing_outcomes(self) -> None:
        """Log that sampling by outcomes begins without any."""
        if not self._is_uniform and not self._records:
            logger.warning(
                "data.sampling=%s: no outcomes are recorded yet, so success rates are unknown until a step is done",
                self._settings.sampling,
            )

    def in_words(self, step: int = 0) -> list[str]:
        """Describe what is sampled, and the tasks of the step after `step` steps."""
        rows = self.tasks_of_step(step)
        lines = []
        if self._weights is not None:
            weighted = zip(self._data.sources, self._weights, strict=True)
            shares = (f"{weight / sum(self._weights):.0%} {name}" for name, weight in weighted)
            lines.append(f"tasks by source: {', '.join(shares)}")
        if not self._is_uniform:
            begins = "" if self._records else "; no outcomes are recorded yet, so it begins uniform"
            lines.append(f"tasks are sampled by data.sampling={self._settings.sampling}{begins}")
        named = ", ".join(self._data.task_id(row) for row in rows[:_NUM_NAMED])
        more = ", ..." if len(rows) > _NUM_NAMED else ""
        return [*lines, f"tasks of step {step + 1}: {named}{more}"]

    def _weights_before(self, step: int) -> list[float] | None:
        """Return the weight of each row in a step; `None` if all are equal."""
        if self._is_uniform:
            return None
        rates = [self._rate_before(step - self._delay, task_id) for task_id in self._ids]
        weights = self._checked(rates, step)
        return weights if any(weight != weights[0] for weight in weights) else None

    def _rate_before(self, step: int, task_id: str) -> float | None:
        return next((rate for done, rate in reversed(self._records.get(task_id, ())) if done < step), None)

    def _checked(self, rates: Sequence[float | None], step: int) -> list[float]:
        where = f"data.sampling={self._settings.sampling}"
        try:
            found = self._weigh(self._data, rates, step)
        except RLLMError:
            raise
        except Exception as error:
            raise PluginError(raised(where, error)) from error
        try:
            weights = [float(weight) for weight in found]
        except (TypeError, ValueError):
            weights = []
        is_valid = len(weights) == len(rates) and all(math.isfinite(weight) and weight >= 0 for weight in weights)
        if not is_valid or any(not any(weights[row] for row in part) for part in self._parts):
            raise ConfigError(
                f"{where} returned {shown(found)} for {counted(len(rates), 'task')} after {counted(step, 'step')}: "
                "return a finite weight of at least 0 for each task, and one above 0 in each weighted dataset"
            )
        return weights


_NUM_NAMED = 8
"""Tasks that a description of a step names."""


def _checked_weights(weights: Sequence[float] | None, sources: Sequence[str]) -> Sequence[float] | None:
    if weights is None:
        return None
    if len(sources) < 2:
        raise ConfigError(f"data.weights={weights} would have no effect with a single dataset: give several, or none")
    if len(weights) != len(sources):
        raise ConfigError(
            f"data.weights={weights}: there are {counted(len(sources), 'dataset')} ({', '.join(sources)}); give one "
            "weight for each, in their order"
        )
    return weights


def apportioned(num_places: int, weights: Sequence[float]) -> list[int]:
    """Divide places among parties by weight (Sainte-Lague's method); no party loses a place as their number grows."""
    total = math.fsum(weights)
    numbers = [max(0, int(num_places * weight / total) - len(weights)) for weight in weights]
    for _ in range(num_places - sum(numbers)):
        numbers[max(range(len(weights)), key=lambda party: weights[party] / (2 * numbers[party] + 1))] += 1
    return numbers


def _drawn(rows: Sequence[int], weights: Sequence[float], count: int, seed: str) -> list[int]:
    """Draw rows without replacement, with probability by weight (Efraimidis & Spirakis 2006); repeat them if few."""
    chance = random.Random(seed)
    keys = {row: math.log(1.0 - chance.random()) / weights[row] for row in rows if weights[row] > 0}
    drawn = heapq.nlargest(count, keys, key=keys.__getitem__)
    return [drawn[place % len(drawn)] for place in range(count)]


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, num_tasks: int) -> list[int]:
    order = list(range(num_tasks))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
