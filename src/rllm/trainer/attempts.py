"""The attempts of a training step and of an evaluation: pure functions of the configuration, the tasks and the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from rllm.algorithms.base import Algorithm
from rllm.config.sampling import derived_seed
from rllm.config.schema import TrainConfig
from rllm.data.dataset import Dataset
from rllm.data.order import more_tasks_of_step, tasks_of_step
from rllm.engine.request import RolloutRequest
from rllm.types import Task

# The trainer's log-probabilities are those of the whole distribution, so nothing may be cut off it, or made less likely.
_CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def training_attempts(
    data: Dataset,
    config: TrainConfig,
    algorithm: Algorithm,
    *,
    step: int,
    extra_round: int = 0,
    num_drawn: int = 0,
    num_tasks: int = 0,
) -> list[RolloutRequest]:
    """`group_size` attempts at each task of a step, and one greedy attempt for algorithms that need it.

    Args:
        data: the tasks.
        config: the run's.
        algorithm: the run's.
        step: how many steps are done.
        extra_round: 0 for the step's own tasks; from 1 on, `num_tasks` others in their place.
        num_drawn: how many others earlier rounds took.
        num_tasks: how many this one takes.
    """
    if extra_round:
        rows = more_tasks_of_step(
            step,
            num_tasks=len(data),
            per_step=config.tasks_per_step,
            num_drawn=num_drawn,
            count=num_tasks,
            seed=config.seed,
        )
    else:
        rows = tasks_of_step(step, num_tasks=len(data), per_step=config.tasks_per_step, seed=config.seed)
    rollout = config.rollout
    sampled = {"temperature": rollout.temperature, "max_tokens": rollout.max_tokens, **_CUTS, **_PENALTIES}
    greedy = {**sampled, "temperature": 0.0}
    attempts = []
    for place, row in enumerate(rows):
        # A task that a step takes twice is two groups: its place in the step keeps them apart.
        task_id = f"{data.task_id(row)}@{step}.{extra_round}.{place}"
        attempt = partial(_attempt, data[row], task_id, split="train", seed=config.seed, step=step)
        for index in range(rollout.group_size):
            attempts.append(attempt(index, sampling=sampled, side_calls=rollout.side_calls))
        if algorithm.needs_greedy:
            attempts.append(attempt(rollout.group_size, sampling=greedy, trainable=False))
    return attempts


def eval_attempts(data: Dataset, config: TrainConfig, *, step: int) -> list[RolloutRequest]:
    """`eval.num_rollouts` attempts at each held-out task after `step` steps. All evaluations of a run have the same seeds, so
    that luck weighs less in their differences."""
    judged = config.eval
    imposed = {"temperature": judged.temperature, "top_p": judged.top_p, "top_k": judged.top_k}
    sampling = {**imposed, "max_tokens": config.rollout.max_tokens}
    times: Counter[str] = Counter()  # rows that are the same task, as `Dataset.repeat` makes them, go on counting
    attempts = []
    for row in range(len(data)):
        task_id = data.task_id(row)
        attempt = partial(_attempt, data[row], task_id, split="eval", seed=config.seed, step=step, trainable=False)
        for _ in range(judged.num_rollouts):
            attempts.append(attempt(times[task_id], sampling=sampling))
            times[task_id] += 1
    return attempts


def _attempt(
    task: Task,
    task_id: str,
    index: int,
    *,
    split: str,
    sampling: Mapping[str, Any],
    seed: int,
    step: int,
    trainable: bool = True,
    side_calls: bool = False,
) -> RolloutRequest:
    given = {name: value for name, value in sampling.items() if value is not None}
    given["seed"] = derived_seed(seed, split, task_id, index)
    return RolloutRequest(
        task=task,
        task_id=task_id,
        index=index,
        split=split,
        training_step=step,
        sampling=given,
        trainable=trainable,
        side_calls=side_calls,
    )
