"""Outcomes of rollouts, and the report of an evaluation: accuracy and pass@k with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Self

from rllm.engine.failures import Reason, count_reasons, why_failed, why_unscored
from rllm.errors import ConfigError
from rllm.types import NO_TOKENS_KEY, SOURCE_KEY, Episode, JSONObject, grouped

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

    It is `1 - C(n - c, k) / C(n, k)`: the fraction of the subsets of k rollouts, out of n, with a correct one.
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
    """Return the number of independent trials whose mean would be as uncertain as these tasks' mean.

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


PROMPT_TOKENS, SAMPLED_TOKENS = "rollout/prompt_tokens", "rollout/sampled_tokens"
_OURS = ("rollout/", "timing/")
NUM_CALLS, SECONDS = "rollout/num_calls", "timing/rollout_s"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one rollout, or means over the rollouts with a known cost; `None` where it is unknown."""

    prompt_tokens: float | None = None
    """Total over all calls; unknown if the server returned no token ids, or the rollout failed."""
    sampled_tokens: float | None = None
    num_calls: float | None = None
    seconds: float | None = None
    """Wall-clock time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one rollout, kept in memory; the episode itself is in the log."""

    task_id: str
    index: int
    is_correct: bool = False
    failure: str | None = None
    """Reason that the rollout failed; a failed one counts as wrong."""
    unscored: str | None = None
    """Reason that the rollout has no score; it counts as neither right nor wrong."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean reward of the scored trajectories, by role."""
    cost: Cost = Cost()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers in the metadata of the reward."""
    no_tokens: str | None = None
    """Reason of the first call without usable tokens, of a rollout that did not fail."""
    source: str | None = None
    """Source of the task, in a dataset of several."""

    @classmethod
    def of(cls, episode: Episode) -> Self:
        """Return the outcome of an episode that `with_costs` has processed, now or before it was logged."""
        failure = why_failed(episode)
        return cls(
            task_id=episode.task_id,
            index=episode.index,
            is_correct=bool(episode.is_correct) and failure is None,
            failure=failure,
            unscored=why_unscored(episode),
            rewards={} if failure else _means((path.name, path.final_reward()) for path in episode.trajectories),
            cost=Cost(
                prompt_tokens=episode.metrics.get(PROMPT_TOKENS),
                sampled_tokens=episode.metrics.get(SAMPLED_TOKENS),
                num_calls=episode.metrics.get(NUM_CALLS),
                seconds=episode.metrics.get(SECONDS),
            ),
            metrics={name: value for name, value in episode.metrics.items() if not name.startswith(_OURS)},
            no_tokens=episode.info.get(NO_TOKENS_KEY) if failure is None else None,
            source=episode.info.get(SOURCE_KEY),
        )


def with_costs(episode: Episode) -> Episode:
    """Count an episode's tokens in its metrics, since the log omits token ids, and return it."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    if steps and all(step.prompt_ids and step.response_ids for step in steps):
        episode.metrics[PROMPT_TOKENS] = float(sum(len(step.prompt_ids) for step in steps))
        episode.metrics[SAMPLED_TOKENS] = float(sum(len(step.response_ids) for step in steps))
    return episode


def _means(rewards: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Return the mean of the known rewards of each role."""
    by_role = grouped((role, reward) for role, reward in rewards if reward is not None)
    return {role: fmean(values) for role, values in sorted(by_role.items())}


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """Results of the rollouts of one task."""

    task_id: str
    num_rollouts: int
    num_correct: int
    num_failed: int
    num_unscored: int
    accuracy: float | None
    """Share of correct rollouts among those that were scored or failed; `None` if there are none."""
    mean_reward: float | None
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Results on tasks of one source. A failed rollout counts as wrong; an unscored one as neither right nor wrong."""

    num_tasks: int
    num_rollouts: int
    num_failed: int
    num_unscored: int
    accuracy: Estimate | None
    """Mean over tasks of the fraction of correct rollouts; `None` if no rollout was scored."""
    mean_reward: float | None
    """Mean over scored rollouts; the reward of a rollout is the mean over its roles."""


@dataclass(frozen=True, kw_only=True)
class Report(SourceReport):
    """Results of an evaluation."""

    num_correct: int
    pass_at_k: dict[int, Estimate]
    """Estimates by k, over the tasks with at least k rollouts that count; empty if nothing was scored."""
    rewards: dict[str, float]
    """Mean reward of each role."""
    cost: Cost
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each number in the metadata of the reward, over the rollouts that have it."""
    failures: list[Reason] = field(default_factory=list)
    """Reasons for failures, most frequent first."""
    unscored: list[Reason] = field(default_factory=list)
    """Reasons for missing scores, most frequent first."""
    no_tokens: list[Reason] = field(default_factory=list)
    """Reasons of calls without usable tokens, one of each rollout that did not fail, most frequent first."""
    sources: dict[str, SourceReport] = field(default_factory=dict)
    """Results by source of a dataset that has several, such as a file of environments."""
    tasks: list[TaskReport] = field(default_factory=list)

    def to_dict(self) -> JSONObject:
        """Return the report as JSON values; k becomes text."""
        data = asdict(self)
        data["pass_at_k"] = {str(k): estimate for k, estimate in data["pass_at_k"].items()}
        return data


def report_on(outcomes: Sequence[Outcome]) -> Report:
    """Return the report on rollouts, one for each task and index."""
    by_task = grouped((outcome.task_id, outcome) for outcome in outcomes)
    tasks = [_task_report(task_id, of_task) for task_id, of_task in by_task.items()]
    is_scored = any(outcome.failure is None and outcome.unscored is None for outcome in outcomes)
    estimates = _pass_at_k(tasks) if is_scored else {}
    return Report(
        num_tasks=len(tasks),
        num_rollouts=len(outcomes),
        num_correct=sum(task.num_correct for task in tasks),
        num_failed=sum(task.num_failed for task in tasks),
        num_unscored=sum(task.num_unscored for task in tasks),
        accuracy=estimates.get(1),
        pass_at_k=estimates,
        mean_reward=mean_of_known(_reward(outcome) for outcome in outcomes),
        rewards=_means(pair for outcome in outcomes for pair in outcome.rewards.items()),
        cost=_cost(outcomes),
        metrics=_means(pair for outcome in outcomes for pair in outcome.metrics.items()),
        failures=count_reasons(outcome.failure for outcome in outcomes if outcome.failure is not None),
        unscored=count_reasons(outcome.unscored for outcome in outcomes if outcome.unscored is not None),
        no_tokens=count_reasons(outcome.no_tokens for outcome in outcomes if outcome.no_tokens is not None),
        sources=_by_source(outcomes),
        tasks=tasks,
    )


def _by_source(outcomes: Sequence[Outcome]) -> dict[str, SourceReport]:
    named = ((outcome.source, replace(outcome, source=None)) for outcome in outcomes if outcome.source is not None)
    names = [field.name for field in fields(SourceReport)]
    whole = {source: report_on(found) for source, found in grouped(named).items()}
    return {source: SourceReport(**{name: getattr(report, name) for name in names}) for source, report in whole.items()}


def _task_report(task_id: str, outcomes: Sequence[Outcome]) -> TaskReport:
    num_correct = sum(outcome.is_correct for outcome in outcomes)
    num_unscored = sum(outcome.unscored is not None for outcome in outcomes)
    num_counted = len(outcomes) - num_unscored
    return TaskReport(
        task_id=task_id,
        num_rollouts=len(outcomes),
        num_correct=num_correct,
        num_failed=sum(outcome.failure is not None for outcome in outcomes),
        num_unscored=num_unscored,
        accuracy=num_correct / num_counted if num_counted else None,
        mean_reward=mean_of_known(_reward(outcome) for outcome in outcomes),
        cost=_cost(outcomes),
    )


def _pass_at_k(tasks: Sequence[TaskReport]) -> dict[int, Estimate]:
    """Return pass@k for every k that a task has rollouts for; pass@1 is the accuracy."""
    counted = [(task.num_rollouts - task.num_unscored, task.num_correct) for task in tasks]
    estimates = {}
    for k in range(1, max((count for count, _ in counted), default=0) + 1):
        enough = [(count, correct) for count, correct in counted if count >= k]
        rates = [pass_at_k(count, correct, k) for count, correct in enough]
        # k rollouts make one pass or failure, which bounds the number of independent trials.
        estimates[k] = mean_over_tasks(rates, sum(count // k for count, _ in enough))
    return estimates


def _reward(outcome: Outcome) -> float | None:
    return fmean(outcome.rewards.values()) if outcome.rewards else None


def _cost(outcomes: Sequence[Outcome]) -> Cost:
    names = [field.name for field in fields(Cost)]
    return Cost(**{name: mean_of_known(getattr(outcome.cost, name) for outcome in outcomes) for name in names})


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not `None`; `None` without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
