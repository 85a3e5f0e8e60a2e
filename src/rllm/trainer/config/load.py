"""A configuration from whatever the user has: nothing, a mapping, a YAML file, or a list of key=value.

Mappings may be hydra's, and keys may be ours or the published ones (`rllm.trainer.config.upstream`), also side by side.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from rllm.config.schema import TrainConfig
from rllm.config.yaml_file import read_settings
from rllm.errors import ConfigError
from rllm.registry import did_you_mean
from rllm.trainer.config.environment import from_environment, tell_misspelt
from rllm.trainer.config.upstream import Translated, from_upstream, without_omegaconf
from rllm.trainer.config.upstream_keys import TABLE, Sets

logger = logging.getLogger(__name__)

_MAPPING, _OVERRIDES = "config", "key=value"
_UNSAID = object()
_LEADING_KEY = re.compile(r"[a-z]\w*(\.\w+)*(?==| is not a setting)")
_NAMED = ("algorithm", "estimator")
"""Settings that are a name and settings of its own."""
_ARGUMENTS = {
    "resume": "to go on with a run, AgentTrainer(..., resume=True) or rllm train --resume RUN_DIR",
    "val": "held-out tasks are given as AgentTrainer(..., val_dataset=...) or rllm train --val",
}
"""What else may be meant by what is said beside the settings, not among them."""

ConfigSource: TypeAlias = "TrainConfig | Mapping[str, Any] | Iterable[str] | str | Path | None"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Settings from one place; a later layer replaces what an earlier one says."""

    name: str
    values: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    """Where in a file each dotted key stands."""


def load_config(source: ConfigSource = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """The configuration of `source`; `key=value` overrides come last.

    Later ones win: the defaults; a file or mapping; the environment, where `RLLM__OPTIM__LR=1e-5` means `optim.lr=1e-5`;
    `key=value`. A finished `TrainConfig` is not changed by the environment. Published keys that mean nothing to the backend
    are named in one line of the log.

    Args:
        source: a `TrainConfig`, a YAML path, a mapping (hydra's `DictConfig`, too), or a list of `key=value`.
        overrides: more `key=value`; of two values of a key the last counts, and the log names both.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    return from_layers(layers_of(source, overrides))


def from_layers(layers: Sequence[Layer]) -> TrainConfig:
    """The configuration that these layers make together.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    found = translated(layers)
    config = _validated(found, layers)
    if found.ignored:
        logger.warning(
            "ignored, since they mean nothing to the backend %s: %s", config.backend, ", ".join(found.ignored)
        )
    return config


def layers_of(source: ConfigSource = None, overrides: Iterable[str] = ()) -> list[Layer]:
    """What `load_config` puts together, in the order in which it does.

    Raises:
        ConfigError: if the source cannot be read.
    """
    source = without_omegaconf(source)
    overrides = list(overrides)
    layers = []
    if isinstance(source, TrainConfig):
        layers.append(Layer(name=_MAPPING, values=_told(source)))
    elif isinstance(source, Mapping):
        layers.append(Layer(name=_MAPPING, values=_plain(source)))
    elif isinstance(source, str | Path):
        values, lines = read_settings(Path(source))
        layers.append(Layer(name=str(source), values=values, lines=lines))
    elif isinstance(source, Iterable):
        overrides = [*source, *overrides]
    elif source is not None:
        raise ConfigError(f"config={source!r}: use a mapping, a YAML path, or a list of key=value")
    if not isinstance(source, TrainConfig):
        tell_misspelt(_all_keys())
        layers.append(Layer(name="environment", values=_applied(from_environment())))
    tell_repeated(overrides)
    layers.append(Layer(name=_OVERRIDES, values=_applied(overrides)))
    return layers


def _told(config: TrainConfig) -> dict[str, Any]:
    """What a finished configuration says that is no default, and the defaults that somebody asked for by name."""
    return _merged(config.model_dump(exclude_unset=True), config.model_dump(exclude_defaults=True))


def translated(layers: Sequence[Layer]) -> Translated:
    """The layers as one, in our own words."""
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merged(values, layer.values)
    return from_upstream(values)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`one`, with what `other` says in its place, section by section."""
    merged = dict(one)
    for key, value in other.items():
        mine = merged.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(mine, value)
        elif isinstance(value, Mapping) and value and mine is not None:
            raise ConfigError(
                f"{key}={mine!r} is a value, and {key}.{next(iter(value))} is set, too: keep one of the two"
            )
        else:
            merged[key] = value
    return merged


def _applied(overrides: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


def _validated(translated: Translated, layers: Sequence[Layer]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(translated.values)
    except ValidationError as error:
        explained = (_explain(item, translated.origins, layers) for item in error.errors())
        raise ConfigError("\n".join(explained)) from None  # which says all of it, without pydantic's words


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain dicts of a nested mapping."""
    items = ((str(key), without_omegaconf(value)) for key, value in mapping.items())
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in items}


def _key_and_text(override: str) -> tuple[str, str]:
    """The two sides of `key=value`; the plus that hydra wants before a key that is new to it changes nothing here."""
    if not isinstance(override, str):
        raise ConfigError(f"{override!r} is not a setting: use the text key=value, such as optim.lr=1e-5")
    key, separator, text = override.partition("=")
    key = key.strip().lstrip("+")
    if not separator or not key:
        raise ConfigError(f"{override!r} lacks its {'value' if key else 'key'}: use key=value, such as optim.lr=1e-5")
    return key, text


def tell_repeated(overrides: Iterable[str]) -> None:
    """Name the settings whose value a later one of the same key, or of their whole section, takes the place of."""
    seen: dict[str, str] = {}
    for key, text in map(_key_and_text, overrides):
        for earlier, value in seen.items():
            if (earlier == key and value != text) or earlier.startswith(f"{key}."):
                logger.warning("%s=%s and %s=%s are both given: the last counts", earlier, value, key, text)
        seen[key] = text


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key. Numbers, booleans, null and lists mean what they do in YAML; settings that are text keep it."""
    key, text = _key_and_text(override)
    *parents, last = key.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"{override!r}: {parent!r} is a value, not a section")
    values[last] = text if _is_text((*parents, last)) and text != "null" else scalar(text)


def _is_text(path: tuple[str, ...]) -> bool:
    """Whether this setting, or the one that a published key stands for, is a string or a path."""
    rule = TABLE.get(".".join(path))
    if isinstance(rule, Sets):
        path = tuple(rule.setting.split("."))
    model: Any = TrainConfig
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = field.annotation
    return model in (str, str | None, Path | None)


def scalar(text: str) -> Any:
    """A number, boolean, null or list as in YAML; anything else is text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 does not know 1e-5
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _explain(error: Any, origins: Mapping[str, str], layers: Sequence[Layer]) -> str:
    """One pydantic error as key, value and remedy; the key first as the user wrote it, behind the file where he did."""
    path = ".".join(str(part) for part in error["loc"])
    place = _place(origins.get(path, path), layers)
    if error["type"] == "extra_forbidden":
        return f"{place}{path} is not a setting; {_hint(error['loc'])}"
    if path in origins:
        path = f"{origins[path]}, here {path}"
    value = error["input"]
    if error["type"] == "model_type":
        return f"{place}{path}={value!r}: this is a section, whose settings are {', '.join(_known_keys(error['loc']))}"
    remedies = {"list_type": f"; write it as [{value}]"}
    if error["loc"][-1] in _NAMED:
        remedies["dict_type"] = f"; write it as {path}.name={value}"
    remedy = remedies.get(error["type"], "") if isinstance(value, str) else ""
    return f"{place}{path}={value!r}: {error['msg'][0].lower()}{error['msg'][1:]}{remedy}"


def _place(key: str, layers: Sequence[Layer]) -> str:
    """Where a key was set that is not before the user's eyes: a file and the line, or the environment."""
    while (layer := setter_of(key, layers)) is None and "." in key:
        key = key.rpartition(".")[0]  # an item of a list
    if layer is None or layer.name in (_MAPPING, _OVERRIDES):
        return ""
    line = layer.lines.get(key)
    return f"{layer.name}: " if line is None else f"{layer.name}, line {line}: "


@contextmanager
def naming_places(layers: Sequence[Layer]) -> Iterator[None]:
    """Name in a mistake inside that begins with a setting where this was set, and by which published key, as a mistake in
    loading does."""
    try:
        yield
    except ConfigError as error:
        found = _LEADING_KEY.match(str(error))
        if found is None:
            raise
        setting = found[0]
        key = translated(layers).origins.get(setting, setting)
        layer = setter_of(key, layers)
        if layer is None or isinstance(_at(layer.values, key), Mapping):  # a section has many places
            raise
        also = "" if key == setting else f"{key}, here "
        raise ConfigError(f"{_place(key, layers)}{also}{error}") from error.__cause__


def setter_of(key: str, layers: Sequence[Layer]) -> Layer | None:
    """The layer whose word on a dotted key counts; `None` where no layer says anything."""
    return next((layer for layer in reversed(layers) if key in layer.lines or _says(layer.values, key)), None)


def _says(values: Any, key: str) -> bool:
    return _at(values, key) is not _UNSAID


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return _UNSAID
        values = values[part]
    return values


def _hint(path: tuple[Any, ...]) -> str:
    """What may have been meant by a key that is none."""
    key, known = str(path[-1]), _known_keys(path[:-1])
    if len(path) == 1 and key in _ARGUMENTS:
        return _ARGUMENTS[key]
    section, dot, rest = key.partition(".")
    if dot:
        return f"write it as `{section}: {{{rest}: ...}}`"
    flat = {item.replace(".", "_"): item for item in _all_keys()}
    if len(path) == 1 and key in flat:
        return f"did you mean {flat[key]!r}?"
    if meant := did_you_mean(key, known, ".".join(map(str, path[:-1]))):
        return meant
    elsewhere = [f"{section}.{key}" for section in _known_keys(()) if key in _known_keys((section,))]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"known here: {', '.join(known)}"


def _all_keys() -> list[str]:
    """Every setting that can be set by its name alone, sections left out."""
    sections = {section: _known_keys((section,)) for section in _known_keys(())}
    return [f"{section}.{key}" for section, keys in sections.items() for key in keys] + [
        key for key, keys in sections.items() if not keys
    ]


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    """The settings of a section; none if it is not a section but a value."""
    kind: Any = TrainConfig
    for part in path:
        named_by_user = get_origin(kind) is dict
        kind = get_args(kind)[1] if named_by_user else kind.model_fields[str(part)].annotation
        if not (get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))):
            return []
    return sorted(kind.model_fields) if hasattr(kind, "model_fields") else []
