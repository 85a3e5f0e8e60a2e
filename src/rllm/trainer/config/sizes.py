"""The sizes of a training step: in words, and checked against each other."""

from __future__ import annotations

import logging
import math

from rllm.backends.schedule import num_updates
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError, counted

logger = logging.getLogger(__name__)


def fit_to_tasks(config: TrainConfig, num_tasks: int) -> None:
    """Let a step take no more tasks than there are, unless somebody asked for as many; and take the steps that `num_epochs`
    asks for."""
    if "tasks_per_step" not in config.model_fields_set:
        config.tasks_per_step = min(config.tasks_per_step, num_tasks)
    if config.num_epochs is not None:
        config.num_steps = math.ceil(config.num_epochs * num_tasks / config.tasks_per_step)


def check_sizes(config: TrainConfig, num_tasks: int) -> None:
    """Refuse sizes that cannot be meant; sizes that only may not be are told in the log.

    Raises:
        ConfigError: if a step's episodes cannot be divided evenly among its updates.
    """
    episodes, parts = num_episodes(config), config.optim.num_minibatches
    if episodes % parts:
        raise ConfigError(
            f"optim.num_minibatches={parts} does not divide the {counted(episodes, 'episode')} of a step, tasks_per_step="
            f"{config.tasks_per_step} x rollout.group_size={config.rollout.group_size}: use {_nearest_divisors(episodes, parts)}"
        )
    if config.tasks_per_step > num_tasks:
        logger.warning("%s", _more_than_there_are(config, num_tasks))
    if config.critic.warmup_steps >= config.num_steps:
        logger.warning("%s", _waits(config))
    if config.optim.warmup_steps > (updates := num_updates(config)):
        logger.warning(
            "optim.warmup_steps=%d is more than the %s of the run: optim.lr is never reached",
            config.optim.warmup_steps,
            counted(updates, "update"),
        )


def num_episodes(config: TrainConfig) -> int:
    """How many episodes a step trains on, unless some are left out."""
    return config.tasks_per_step * config.rollout.group_size


def in_words(config: TrainConfig, num_tasks: int) -> list[str]:
    """What the sizes mean: episodes and updates of a step, and how often the tasks are gone through."""
    times = config.num_steps * config.tasks_per_step / num_tasks
    tasks = counted(config.tasks_per_step, "task")
    told = [
        f"{tasks} x {counted(config.rollout.group_size, 'rollout')} = {counted(num_episodes(config), 'episode')} a step, "
        f"{_updates(config)}",
        *_baselines(config),
        f"{counted(config.num_steps, 'step')} x {tasks} = {_often(times)} through the {counted(num_tasks, 'task')}",
    ]
    if config.tasks_per_step > num_tasks:
        told.append(_more_than_there_are(config, num_tasks))
    if config.critic.warmup_steps:
        told.append(_waits(config))
    ahead = config.rollout.max_staleness
    if ahead:
        told.append(f"rollouts run up to {counted(ahead, 'step')} ahead of the updates")
    if config.rollout.resample_rounds:
        told.append(
            f"tasks whose rollouts all earn the same are replaced, at most {_often(config.rollout.resample_rounds)} a step"
        )
    return told


def _baselines(config: TrainConfig) -> list[str]:
    from rllm.algorithms.configured import kind_of  # which imports torch

    if not kind_of(config.algorithm).needs_greedy:
        return []
    return [f"and {counted(config.tasks_per_step, 'greedy rollout')} to compare with, one for each task"]


def _updates(config: TrainConfig) -> str:
    parts = config.optim.num_minibatches
    number = config.optim.num_epochs * parts
    return "1 update" if number == 1 else f"{number} updates of {counted(num_episodes(config) // parts, 'episode')}"


def _nearest_divisors(whole: int, parts: int) -> str:
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    below, above = [number for number in divisors if number < parts], [number for number in divisors if number > parts]
    return " or ".join(str(number) for number in (*below[-1:], *above[:1]))


def _waits(config: TrainConfig) -> str:
    number = config.critic.warmup_steps
    if number < config.num_steps:
        return f"in the first {counted(number, 'step')} the critic alone is updated"
    return f"critic.warmup_steps={number} and num_steps={config.num_steps}: the critic alone is updated, and the policy learns nothing"


def _often(times: float) -> str:
    if times == 1:
        return "once"
    return f"{times:.3g} times" if times < 1000 else f"{times:,.0f} times"


def _more_than_there_are(config: TrainConfig, num_tasks: int) -> str:
    there, some = ("1 there is", "it") if num_tasks == 1 else (f"{num_tasks} there are", "some of them")
    return (
        f"tasks_per_step={config.tasks_per_step} is more than the {there}: a step takes {some} more than once, each time as a "
        "group of its own"
    )
