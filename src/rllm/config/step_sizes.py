"""Sizes of a training step: derived, checked against each other, and described in words."""

from __future__ import annotations

import logging
import math

from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError, counted

logger = logging.getLogger(__name__)


def fitted_to_tasks(config: TrainConfig, num_tasks: int) -> TrainConfig:
    """Return the configuration with `tasks_per_step` and `num_steps` derived from the number of tasks.

    `tasks_per_step` is at most the number of tasks unless it was set; `num_steps` follows from `num_epochs`.
    """
    fitted: dict[str, int] = {}
    tasks_per_step = config.tasks_per_step
    if "tasks_per_step" not in config.model_fields_set:
        fitted["tasks_per_step"] = tasks_per_step = min(tasks_per_step, num_tasks)
    if config.num_epochs is not None:
        fitted["num_steps"] = math.ceil(config.num_epochs * num_tasks / tasks_per_step)
    return config.model_copy(update=fitted)


def check_sizes(config: TrainConfig, num_tasks: int) -> None:
    """Refuse sizes that contradict each other, and warn of those that are probably a mistake.

    Raises:
        ConfigError: if a step's episodes cannot be divided evenly among its updates.
    """
    episodes, parts = num_episodes(config), config.optim.num_minibatches
    if episodes % parts:
        raise ConfigError(
            f"optim.num_minibatches={parts} does not divide the {counted(episodes, 'episode')} of a step, "
            f"tasks_per_step={config.tasks_per_step} x rollout.group_size={config.rollout.group_size}: use "
            f"{_nearest_divisors(episodes, parts)}"
        )
    if config.tasks_per_step > num_tasks:
        logger.warning("%s", _repeated_tasks(config, num_tasks))
    if config.critic.warmup_steps >= config.num_steps:
        logger.warning("%s", _critic_warmup(config))
    if config.optim.warmup_steps > (updates := num_updates(config)):
        logger.warning(
            "optim.warmup_steps=%d is more than the %s of the run: the learning rate never reaches optim.lr",
            config.optim.warmup_steps,
            counted(updates, "update"),
        )


def num_episodes(config: TrainConfig) -> int:
    """Return the episodes of a step, before any is dropped."""
    return config.tasks_per_step * config.rollout.group_size


def num_updates(config: TrainConfig) -> int:
    """Return the policy's updates in a run each of whose steps has something to learn."""
    num_steps = config.num_steps - config.critic.warmup_steps  # in which the policy is not updated
    return max(num_steps, 1) * config.optim.num_minibatches * config.optim.num_epochs


def sizes_in_words(config: TrainConfig, num_tasks: int, *, needs_greedy: bool) -> list[str]:
    """Describe the episodes and updates of a step, and the number of passes over the tasks.

    Args:
        config: settled by the trainer.
        num_tasks: training tasks.
        needs_greedy: whether the algorithm compares with a greedy rollout of each task.
    """
    times = config.num_steps * config.tasks_per_step / num_tasks
    tasks = counted(config.tasks_per_step, "task")
    lines = [
        f"{tasks} x {counted(config.rollout.group_size, 'rollout')} = {counted(num_episodes(config), 'episode')} a "
        f"step, {_updates(config)}"
    ]
    if needs_greedy:
        lines.append(f"and {counted(config.tasks_per_step, 'greedy rollout')} to compare with, one for each task")
    lines.append(
        f"{counted(config.num_steps, 'step')} x {tasks} = {_times(times)} through the {counted(num_tasks, 'task')}"
    )
    if config.tasks_per_step > num_tasks:
        lines.append(_repeated_tasks(config, num_tasks))
    if config.critic.warmup_steps:
        lines.append(_critic_warmup(config))
    if ahead := config.rollout.max_staleness:
        lines.append(f"rollouts run up to {counted(ahead, 'step')} ahead of the updates")
    if rounds := config.rollout.resample_rounds:
        lines.append(f"tasks whose rollouts all earn the same are replaced, at most {_times(rounds)} a step")
    return lines


def _updates(config: TrainConfig) -> str:
    parts = config.optim.num_minibatches
    number = config.optim.num_epochs * parts
    return "1 update" if number == 1 else f"{number} updates of {counted(num_episodes(config) // parts, 'episode')}"


def _nearest_divisors(whole: int, parts: int) -> str:
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    below, above = [number for number in divisors if number < parts], [number for number in divisors if number > parts]
    return " or ".join(str(number) for number in (*below[-1:], *above[:1]))


def _critic_warmup(config: TrainConfig) -> str:
    number = config.critic.warmup_steps
    if number < config.num_steps:
        return f"in the first {counted(number, 'step')} only the critic is updated"
    return (
        f"critic.warmup_steps={number} and num_steps={config.num_steps}: only the critic is updated, the policy never"
    )


def _times(times: float) -> str:
    if times == 1:
        return "once"
    return f"{times:.3g} times" if times < 1000 else f"{times:,.0f} times"


def _repeated_tasks(config: TrainConfig, num_tasks: int) -> str:
    return (
        f"tasks_per_step={config.tasks_per_step} exceeds the {counted(num_tasks, 'task')} of the data set: a step "
        "repeats tasks, each time as a separate group"
    )
