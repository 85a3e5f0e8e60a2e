"""The algorithm of a configuration, with its settings converted to the types of the algorithm's fields."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from rllm.algorithms import ALGORITHMS
from rllm.algorithms.base import Algorithm
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.errors import ConfigError
from rllm.registry import resolve, suggestion
from rllm.types import JSONMapping, JSONObject

DEFAULT = "grpo"
"""The algorithm of a section with settings and without a name."""


def name_of(section: JSONMapping) -> str:
    """Return the name in the section `algorithm`: a short one, or `package.module:Class`."""
    return str(section.get("name", DEFAULT))


def kind_of(section: JSONMapping) -> type[Algorithm]:
    """Return the class that the section `algorithm` names.

    Raises:
        ConfigError: if it is unknown, or not an algorithm.
    """
    name = name_of(section)
    kind = resolve(name, ALGORITHMS, kind="algorithm.name")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(
            f"algorithm.name={name!r} is not an algorithm: name a subclass of rllm.algorithms.base.Algorithm"
        )
    return kind


def check_critic(config: TrainConfig) -> None:
    """Raise `ConfigError` if the section `critic` is set and the algorithm has no critic."""
    if not kind_of(config.algorithm).needs_values:
        why = f"because {name_of(config.algorithm)} has no critic; leave it out"
        refuse_changes(config.critic, "critic", type(config.critic).model_fields, why)


def algorithm_of(config: TrainConfig) -> Algorithm:
    """Return the algorithm of a configuration, with the defaults that follow from its other settings.

    The length that aggregation=fixed-length divides by is `rollout.max_tokens`; with `rollout.max_staleness` or
    `data.replay`, samples of older weights are corrected for.

    Raises:
        ConfigError: if the algorithm or one of its settings is unknown or does not fit.
    """
    section, rollout = config.algorithm, config.rollout
    kind = kind_of(section)
    settings = _typed(kind, {key: value for key, value in section.items() if key != "name"}, name_of(section))
    if "fixed_length" not in settings and settings.get("aggregation", kind.aggregation) == "fixed-length":
        settings["fixed_length"] = rollout.max_tokens
    is_exempt = kind.demonstrated or kind.of_sampler or kind.correction != "none"
    if (rollout.max_staleness or config.data.replay) and not is_exempt:
        settings.setdefault("correction", "truncate")
    if config.reward.weights and "weights" in {item.name for item in fields(kind)}:
        settings.setdefault("weights", config.reward.weights)
    return kind(**settings)


def _typed(kind: type[Algorithm], settings: JSONMapping, name: str) -> JSONObject:
    """Return the settings in the types of the fields; they may be text, as which YAML reads `3e-4`."""
    types = get_type_hints(kind)
    known = sorted(item.name for item in fields(kind))
    typed = {}
    for key, value in settings.items():
        if key not in known:
            hint = suggestion(key, ["name", *known], "algorithm")
            raise ConfigError(f"algorithm.{key} is not a setting of {name}; {hint}")
        if isinstance(value, bool) and types[key] is not bool:
            raise ConfigError(f"algorithm.{key}={value!r}: true and false are not valid values of this setting")
        try:
            typed[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"algorithm.{key}={value!r}: {error.errors()[0]['msg']}") from error
    return typed
