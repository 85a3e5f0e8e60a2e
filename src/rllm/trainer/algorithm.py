"""The configured algorithm, and checks of it and of single roles against the rest of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from rllm.algorithms.base import Algorithm
from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.errors import ConfigError


def make_algorithm(config: TrainConfig) -> Algorithm:
    """Return the run's algorithm.

    Raises:
        ConfigError: if it or one of its settings is unknown or does not fit.
    """
    algorithm = algorithm_of(config)
    if config.rollout.group_size < algorithm.min_group_size:
        raise ConfigError(
            f"rollout.group_size={config.rollout.group_size}: {name_of(config.algorithm)} compares rollouts of one "
            f"task; use at least {algorithm.min_group_size}"
        )
    return algorithm


def check_roles(config: TrainConfig, algorithm: Algorithm) -> None:
    """Check the settings of single roles against the algorithm.

    Raises:
        ConfigError: naming a setting without effect.
    """
    for name, role in config.roles.items():
        key = f"roles.{name}"
        if not role.trainable:
            refuse_changes(role, key, ("weight",), "on trajectories that are not trained on; leave out one of the two")
        if algorithm.credits_tokens and role.weight != 1.0:
            raise ConfigError(
                f"{key}.weight: {type(algorithm).__name__} credits single tokens of all roles together: leave it out, "
                "or use an algorithm that compares rollouts, such as grpo"
            )


_OF_ROLLOUTS = (
    *("rollout.temperature", "rollout.max_tokens", "rollout.max_steps"),
    *("rollout.resample_rounds", "rollout.max_staleness"),
    *("eval.num_rollouts", "eval.temperature", "eval.top_p", "eval.top_k", "gateway.host", "gateway.port"),
    *("filters.ended_by", "filters.truncated", "model.reference_offload", "model.engine"),
)
_OF_DEMONSTRATIONS = ("sft.train_on", "sft.tokenize_method", "sft.reward_threshold", "sft.best_per_task")


def check_fit(config: TrainConfig, *, demonstrates: bool) -> None:
    """Refuse an algorithm, or settings, that do not fit the source of the episodes.

    Raises:
        ConfigError: naming the setting.
    """
    name, algorithm = name_of(config.algorithm), kind_of(config.algorithm)
    if algorithm.demonstrated and not demonstrates:
        raise ConfigError(
            f"algorithm.name={name}: it learns from demonstrations, not from rollouts: use AgentSFTTrainer or "
            "`rllm sft`, or an algorithm such as grpo"
        )
    if demonstrates and not algorithm.demonstrated:
        raise ConfigError(
            f"algorithm.name={name}: it learns from rollouts, not from demonstrations: leave it out, or use sft"
        )
    if demonstrates:
        _refuse(config, _OF_ROLLOUTS, "on demonstrations, which are not sampled")
        if config.rollout.group_size != 1:
            raise ConfigError(
                f"rollout.group_size={config.rollout.group_size}: a demonstration is shown once a step; leave it out"
            )
    else:
        _refuse(config, _OF_DEMONSTRATIONS, "because there are no demonstrations")
        if config.rollout.resample_rounds and config.rollout.group_size == 1 and not algorithm.needs_greedy:
            raise ConfigError(
                f"rollout.resample_rounds={config.rollout.resample_rounds}: a single rollout of a task "
                "(rollout.group_size=1) never differs from others, so every task would be dropped; use a group_size "
                "of at least 2, or leave it out"
            )
    if not algorithm.needs_rewards:
        _refuse(config, ("rollout.resample_rounds",), f"because {name} does not compare rewards")


def _refuse(config: TrainConfig, keys: Sequence[str], why: str) -> None:
    """Raise `ConfigError` for the first of these settings that was changed, since it would have no effect."""
    for key in keys:
        section, _, name = key.partition(".")
        refuse_changes(getattr(config, section), section, [name], f"{why}; leave it out")
