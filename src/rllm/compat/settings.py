"""Translation of settings of the rLLM framework, and of hydra's containers, to ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, assert_never

import yaml

from rllm.compat.setting_table import TABLE, ForVerl, Ignored, PartOf, Refused, Rule, Sets
from rllm.config.schema import DataConfig
from rllm.config.yaml_file import leaves
from rllm.errors import ConfigError
from rllm.registry import closest
from rllm.types import JSONMapping, JSONObject

PUBLISHED = Path(__file__).parents[1] / "trainer" / "config" / "agent_ppo_trainer.yaml"
"""Keys and defaults of the rLLM framework. hydra finds the file as `pkg://rllm.trainer.config`, so it stays there."""

_SHARED = {
    section: {key.split(".")[1] for key in TABLE if key.startswith(f"{section}.")}
    for section in ("algorithm", "critic")
}
"""Sections of both vocabularies, with their published keys."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Settings of a configuration by our own keys."""

    values: JSONObject
    """For `TrainConfig`."""
    ignored: list[str] = field(default_factory=list)
    """Keys of the rLLM framework that the user set and that have no meaning here."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of the rLLM framework that a setting of ours, such as `optim.lr`, was given by."""


def translate(mapping: JSONMapping) -> Translation:
    """Return our settings for a nested mapping of the rLLM framework's keys, of ours, or of both.

    A key of the framework counts as set if it is neither null nor its default in `agent_ppo_trainer.yaml`.

    Raises:
        ConfigError: naming every key of the framework that is unknown, unsupported, or in conflict with a setting of
            ours.
    """
    published, ours = _split(mapping)
    defaults = published_defaults()
    values: JSONObject = {}
    mistakes: list[str] = []
    for key, value in published.items():
        if _rule(key) is None:
            mistakes.append(f"{key} is not a setting; {_hint(key)}")
        elif value is not None and value != defaults.get(key):
            values[key] = value
    result = Translation(values=ours)
    for key, value in values.items():
        try:
            _translate(key, value, values, result)
        except ValueError as error:
            mistakes.append(f"{key}={value!r}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return result


def _split(mapping: JSONMapping) -> tuple[JSONObject, JSONObject]:
    """Return the framework's keys, dotted, and ours, nested."""
    groups = _groups()
    published = {key: value for key, value in mapping.items() if key in groups}
    ours = {key: value for key, value in mapping.items() if key not in groups}
    values = published.get("data")
    if isinstance(values, Mapping):  # ours by name, all others in the framework's words
        ours["data"] = {key: value for key, value in values.items() if key in DataConfig.model_fields}
        published["data"] = {key: value for key, value in values.items() if key not in ours["data"]}
        if not published["data"]:
            del published["data"]
    for section, known in _SHARED.items():
        values = ours.get(section)
        if isinstance(values, Mapping) and not known.isdisjoint(values):
            published[section] = {key: value for key, value in values.items() if key in known}
            ours[section] = {key: value for key, value in values.items() if key not in known}
            if not ours[section]:
                del ours[section]
    return dict(leaves(published)), ours


def our_key(key: str) -> str:
    """Return our name of a dotted key of the rLLM framework; any other key unchanged."""
    rule = TABLE.get(key)
    return rule.setting if isinstance(rule, Sets) else key


@cache
def published_defaults() -> JSONObject:
    """Return every dotted key of `agent_ppo_trainer.yaml` with its value there."""
    return dict(leaves(yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))))


def _groups() -> set[str]:
    """Return the sections that only the framework has."""
    return {key.split(".")[0] for key in published_defaults()} - _SHARED.keys()


def _rule(key: str) -> Rule | None:
    """Return the rule of a key, or of the open section that it lies in."""
    if key in TABLE:
        return TABLE[key]
    if key in published_defaults():
        return Ignored()
    sections = (section for section, default in published_defaults().items() if default == {})
    return next((TABLE.get(section, Ignored()) for section in sections if key.startswith(f"{section}.")), None)


def _hint(key: str) -> str:
    published = published_defaults()
    if (meant := closest(key, published, cutoff=0.8)) is not None:
        return f"did you mean {meant!r}?"
    known = [name for name in published if name.startswith(key.rpartition(".")[0] + ".")]
    return f"use one of {', '.join(known or sorted(_groups()))}"


def _translate(key: str, value: object, given: JSONMapping, result: Translation) -> None:
    rule = _rule(key)
    assert rule is not None, "unknown keys are mistakes already"
    if isinstance(rule, ForVerl) and result.values.get("backend") != "verl":
        rule = Ignored()
    match rule:
        case Sets():
            converted = rule.convert(value, given)
            if converted is not None:
                _put(result.values, rule.setting, converted, new=rule.setting not in result.origins)
                result.origins.setdefault(rule.setting, key)
            for setting, more in rule.also(value, given).items():
                _put(result.values, setting, more, new=setting not in result.origins)
                result.origins.setdefault(setting, key)
            result.ignored.extend(f"{key}={part}" for part in rule.left_out(value))
        case Refused():
            if value not in rule.unless:
                raise ValueError(rule.remedy)
        case Ignored():
            result.ignored.append(key)
        case PartOf():
            pass
        case _:
            assert_never(rule)


def _put(values: JSONObject, setting: str, value: object, *, new: bool) -> None:
    """Set a dotted setting of ours, unless it is set already to another value."""
    *sections, last = setting.split(".")
    for section in sections:
        values[section] = dict(values.get(section) or {})
        values = values[section]
    if new and values.get(last, value) != value:
        raise ValueError(f"{setting}={values[last]!r} is the same setting with another value: keep one of the two")
    values[last] = value


def without_omegaconf(value: object) -> Any:
    """Return a `DictConfig` or `ListConfig` as resolved plain dicts and lists; anything else unchanged.

    Raises:
        ConfigError: if an interpolation cannot be resolved, or a mandatory value is missing.
    """
    omegaconf = sys.modules.get("omegaconf")  # a container of it exists only if it was imported
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    register_resolvers()
    try:
        return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"config: {error}") from error


def register_resolvers() -> None:
    """Register the resolver `mul`, which the framework's configurations use, if omegaconf is installed.

    hydra composes before any code of ours is called, but resolves later, so registering on import is early enough.
    """
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:
        return
    if not OmegaConf.has_resolver("mul"):
        OmegaConf.register_new_resolver(
            "mul", lambda left, right: None if left is None or right is None else left * right
        )
