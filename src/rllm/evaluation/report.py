"""What an evaluation found, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rllm.engine.failures import Reason, count_reasons
from rllm.evaluation.outcome import Outcome
from rllm.evaluation.pass_at_k import Estimate, mean_over_tasks, pass_at_k


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one rollout takes, as means over the rollouts of which it is known; `None` where that is none."""

    prompt_tokens: float | None
    """Of all its calls together."""
    sampled_tokens: float | None
    num_calls: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """How the rollouts of one task went."""

    task_id: str
    num_rollouts: int
    num_correct: int
    num_failed: int
    num_unscored: int
    accuracy: float | None
    """Of the rollouts that were judged or failed; `None` if there are none."""
    mean_reward: float | None
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an evaluation found. A failed rollout counts as wrong; an unscored one counts as neither right nor wrong."""

    num_tasks: int
    num_rollouts: int
    num_correct: int
    num_failed: int
    num_unscored: int
    accuracy: Estimate | None
    """The mean over tasks of the share of their rollouts that are correct; `None` if nothing was judged."""
    pass_at_k: dict[int, Estimate]
    """By k, over the tasks that have at least k rollouts which count."""
    mean_reward: float | None
    """Over scored rollouts; that of a rollout is the mean over its roles, however many trajectories each has."""
    rewards: dict[str, float]
    """The same for each role."""
    cost: Cost
    failures: list[Reason] = field(default_factory=list)
    """Why rollouts failed, most frequent first."""
    unscored: list[Reason] = field(default_factory=list)
    """Why rollouts were not judged."""
    tasks: list[TaskReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; k becomes text."""
        data = asdict(self)
        data["pass_at_k"] = {str(k): estimate for k, estimate in data["pass_at_k"].items()}
        return data


def report_on(outcomes: Sequence[Outcome]) -> Report:
    """The report on these rollouts, of which there is one for each task and index."""
    by_task: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_task.setdefault(outcome.task_id, []).append(outcome)
    tasks = [_task_report(task_id, of_task) for task_id, of_task in by_task.items()]
    estimates = _pass_at_k(tasks)
    return Report(
        num_tasks=len(tasks),
        num_rollouts=len(outcomes),
        num_correct=sum(task.num_correct for task in tasks),
        num_failed=sum(task.num_failed for task in tasks),
        num_unscored=sum(task.num_unscored for task in tasks),
        accuracy=estimates.get(1),
        pass_at_k=estimates,
        mean_reward=_mean(_reward(outcome) for outcome in outcomes),
        rewards=_rewards_by_role(outcomes),
        cost=_cost(outcomes),
        failures=count_reasons(outcome.failure for outcome in outcomes if outcome.failure is not None),
        unscored=count_reasons(outcome.unscored for outcome in outcomes if outcome.unscored is not None),
        tasks=tasks,
    )


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
        mean_reward=_mean(_reward(outcome) for outcome in outcomes),
        cost=_cost(outcomes),
    )


def _pass_at_k(tasks: Sequence[TaskReport]) -> dict[int, Estimate]:
    """pass@k for every k that a task has rollouts for; pass@1 is the accuracy."""
    counted = [(task.num_rollouts - task.num_unscored, task.num_correct) for task in tasks]
    estimates = {}
    for k in range(1, max((count for count, _ in counted), default=0) + 1):
        enough = [(count, correct) for count, correct in counted if count >= k]
        rates = [pass_at_k(count, correct, k) for count, correct in enough]
        # k rollouts go into one pass or failure, so that many independent trials there are at most.
        estimates[k] = mean_over_tasks(rates, sum(count // k for count, _ in enough))
    return estimates


def _reward(outcome: Outcome) -> float | None:
    return fmean(outcome.rewards.values()) if outcome.rewards else None


def _rewards_by_role(outcomes: Iterable[Outcome]) -> dict[str, float]:
    by_role: dict[str, list[float]] = {}
    for outcome in outcomes:
        for role, reward in outcome.rewards.items():
            by_role.setdefault(role, []).append(reward)
    return {role: fmean(rewards) for role, rewards in sorted(by_role.items())}


def _cost(outcomes: Sequence[Outcome]) -> Cost:
    return Cost(
        prompt_tokens=_mean(outcome.prompt_tokens for outcome in outcomes),
        sampled_tokens=_mean(outcome.sampled_tokens for outcome in outcomes),
        num_calls=_mean(outcome.num_calls for outcome in outcomes),
        seconds=_mean(outcome.seconds for outcome in outcomes),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
