"""The configured algorithm, and what sets single roles apart, checked against the rest of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rllm.algorithms.base import Algorithm
from rllm.algorithms.configured import algorithm_from, kind_of, name_of
from rllm.backends.refusals import refuse_changes
from rllm.config.schema import RoleConfig, TrainConfig
from rllm.errors import ConfigError
from rllm.trainer.roles import Role

_OF_THE_RUN = frozenset(item.name for item in fields(Algorithm))
"""Settings of the loss, and of what is credited as one."""


def make_algorithm(config: TrainConfig) -> Algorithm:
    """The run's algorithm.

    Raises:
        ConfigError: if it or one of its settings is not known, or does not fit.
    """
    return _made(config.algorithm, "algorithm", config)


def make_roles(config: TrainConfig, algorithm: Algorithm) -> dict[str, Role]:
    """What the configuration says of single roles.

    Raises:
        ConfigError: if an estimator is wrong, or cannot be combined with the run's algorithm.
    """
    return {name: _role(f"roles.{name}", given, config, algorithm) for name, given in config.roles.items()}


def _role(key: str, given: RoleConfig, config: TrainConfig, algorithm: Algorithm) -> Role:
    if not given.trainable:
        refuse_changes(
            given, key, ("weight", "estimator"), "on what is not learned from; leave it or trainable=false out"
        )
    estimator = _estimator(f"{key}.estimator", given.estimator, config, algorithm) if given.estimator else None
    if algorithm.credits_tokens and (estimator is not None or given.weight != 1.0):
        setting = "weight" if estimator is None else "estimator"
        raise ConfigError(
            f"{key}.{setting}: {type(algorithm).__name__} credits single tokens of all roles together: leave it out, or use "
            "an algorithm that compares rollouts, such as grpo"
        )
    return Role(trainable=given.trainable, weight=given.weight, estimator=estimator)


def _estimator(key: str, given: Mapping[str, Any], config: TrainConfig, algorithm: Algorithm) -> Algorithm:
    if not algorithm.needs_rewards:
        raise ConfigError(
            f"{key}={given!r}: an estimator credits rewards, and for {type(algorithm).__name__} they count for nothing; leave it "
            "out"
        )
    if name := next((name for name in given if name in _OF_THE_RUN), None):
        raise ConfigError(
            f"{key}.{name}={given[name]!r} would have no effect: an estimator only credits, and everything else is as the run's "
            f"algorithm has it; set algorithm.{name}, or leave it out"
        )
    estimator = _made({**given, "aggregation": Algorithm.aggregation}, key, config)  # it has no part in the loss
    if not algorithm.credits_tokens and not _estimates(estimator, algorithm):
        raise ConfigError(
            f"{key}={given!r}: it needs a critic, a teacher, or rollouts that the run's algorithm does not make: use one that "
            "compares rollouts, such as grpo or rloo"
        )
    return estimator


def _estimates(estimator: Algorithm, algorithm: Algorithm) -> bool:
    """Whether it can credit the rollouts of a run of the algorithm from their rewards alone."""
    from_rewards = estimator.needs_rewards and not estimator.credits_tokens and not estimator.needs_teacher
    return from_rewards and (algorithm.needs_greedy or not estimator.needs_greedy)


_OF_ROLLOUTS = (
    *("rollout.temperature", "rollout.max_tokens", "rollout.max_steps"),
    *("rollout.resample_rounds", "rollout.max_staleness"),
    *("eval.num_rollouts", "eval.temperature", "eval.top_p", "eval.top_k", "gateway.host", "gateway.port"),
    *("filters.ended_by", "filters.truncated", "model.reference_offload", "model.engine"),
)
_OF_DEMONSTRATIONS = ("sft.train_on", "sft.tokenize_method", "sft.reward_threshold", "sft.best_per_task")


def check_fit(config: TrainConfig, *, demonstrates: bool) -> None:
    """Refuse an algorithm, or settings, that mean nothing for where the episodes come from.

    Raises:
        ConfigError: naming the setting.
    """
    name, algorithm = name_of(config.algorithm), kind_of(config.algorithm)
    if algorithm.demonstrated and not demonstrates:
        raise ConfigError(
            f"algorithm.name={name}: it learns from demonstrations, and here the policy rolls out: use AgentSFTTrainer or "
            "`rllm sft`, or an algorithm such as grpo"
        )
    if demonstrates and not algorithm.demonstrated:
        raise ConfigError(
            f"algorithm.name={name}: it learns from rollouts, and here are demonstrations: leave it out, or use sft"
        )
    if demonstrates:
        _refuse(config, _OF_ROLLOUTS, "because demonstrations are shown, not sampled")
        if config.rollout.group_size != 1:
            raise ConfigError(
                f"rollout.group_size={config.rollout.group_size}: a demonstration is shown once a step; leave it out"
            )
    else:
        _refuse(config, _OF_DEMONSTRATIONS, "because the policy rolls out, and is shown nothing")
        if config.rollout.resample_rounds and config.rollout.group_size == 1 and not algorithm.needs_greedy:
            raise ConfigError(
                f"rollout.resample_rounds={config.rollout.resample_rounds}: a single rollout of a task (rollout.group_size=1) never "
                "differs from others, so every task would be left out; use a group_size of at least 2, or leave it out"
            )
    if not algorithm.needs_rewards:
        _refuse(config, ("rollout.resample_rounds",), f"because {name} does not compare rewards")


def _refuse(config: TrainConfig, keys: Sequence[str], why: str) -> None:
    """Raise `ConfigError` for the first of these settings that is not as it is by default: here it would have no effect."""
    for key in keys:
        section, _, name = key.partition(".")
        refuse_changes(getattr(config, section), section, [name], f"{why}; leave it out")


def _made(given: Mapping[str, Any], section: str, config: TrainConfig) -> Algorithm:
    rollout = config.rollout
    algorithm = algorithm_from(
        given, max_tokens=rollout.max_tokens, max_staleness=rollout.max_staleness, section=section
    )
    if rollout.group_size < algorithm.min_group_size:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size}: {name_of(given)} compares siblings; use at least "
            f"{algorithm.min_group_size}"
        )
    return algorithm
