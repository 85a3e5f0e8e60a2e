"""The algorithm that a section of a configuration names, with its settings in the types of the algorithm's fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rllm.algorithms import ALGORITHMS
from rllm.algorithms.base import Algorithm
from rllm.errors import ConfigError
from rllm.registry import did_you_mean, resolve

DEFAULT = "grpo"
"""What a section that gives settings and no `name` is about."""


def name_of(given: Mapping[str, Any]) -> str:
    """The name in a section such as `algorithm`: a short one, or `package.module:Class`."""
    return str(given.get("name", DEFAULT))


def kind_of(given: Mapping[str, Any], section: str = "algorithm") -> type[Algorithm]:
    """The class that a section names.

    Raises:
        ConfigError: if it is not known, or no algorithm.
    """
    name = name_of(given)
    kind = resolve(name, ALGORITHMS, kind=f"{section}.name")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(f"{section}.name={name!r} is no algorithm: name a subclass of rllm.algorithms.base.Algorithm")
    return kind


def algorithm_from(
    given: Mapping[str, Any], *, max_tokens: int | None, max_staleness: int = 0, section: str = "algorithm"
) -> Algorithm:
    """The algorithm of a section, with the defaults that follow from the rest of the configuration.

    Args:
        given: `name`, and settings, which may be text: YAML reads `3e-4` as such.
        max_tokens: of an answer (`rollout.max_tokens`); the `fixed_length` that aggregation=fixed-length divides by.
        max_staleness: `rollout.max_staleness`; above 0, what older weights have sampled is corrected for.
        section: what `given` is called in messages.

    Raises:
        ConfigError: if the algorithm or one of its settings is not known, or does not fit.
    """
    kind = kind_of(given, section)
    settings = _typed(kind, {key: value for key, value in given.items() if key != "name"}, name_of(given), section)
    if "fixed_length" not in settings and settings.get("aggregation", kind.aggregation) == "fixed-length":
        settings["fixed_length"] = max_tokens
    if max_staleness and kind.correction == "none" and not kind.demonstrated:
        settings.setdefault("correction", "truncate")
    try:
        return kind(**settings)
    except ConfigError as error:
        # An algorithm knows no other section than `algorithm`.
        raise ConfigError(re.sub(r"\Aalgorithm\.", f"{section}.", str(error))) from None


def algorithm_of(config: Any) -> Algorithm:
    """The algorithm of a whole configuration.

    Raises:
        ConfigError: if it or one of its settings is not known, or does not fit.
    """
    rollout = config.rollout
    return algorithm_from(config.algorithm, max_tokens=rollout.max_tokens, max_staleness=rollout.max_staleness)


def _typed(kind: type[Algorithm], settings: Mapping[str, Any], name: str, section: str) -> dict[str, Any]:
    types = get_type_hints(kind)
    known = sorted(item.name for item in fields(kind))
    typed = {}
    for key, value in settings.items():
        if key not in known:
            meant = did_you_mean(key, ["name", *known], section) or f"known here: {', '.join(known)}"
            raise ConfigError(f"{section}.{key} is not a setting of {name}; {meant}")
        if isinstance(value, bool) and types[key] is not bool:
            raise ConfigError(f"{section}.{key}={value!r}: booleans are not accepted here")
        try:
            typed[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{section}.{key}={value!r}: {error.errors()[0]['msg']}") from error
    return typed
