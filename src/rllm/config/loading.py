"""Loading of a configuration: defaults, a file or mapping, the environment, and `key=value` overrides, in layers.

Mappings may be hydra's, and keys may be ours, the rLLM framework's (`rllm.compat.settings`), or both.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from rllm.compat.settings import Translation, our_key, translate, without_omegaconf
from rllm.config.schema import TrainConfig
from rllm.config.yaml_file import leaves, read_settings
from rllm.errors import ConfigError
from rllm.registry import did_you_mean, suggestion
from rllm.types import JSONMapping, JSONObject

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

logger = logging.getLogger(__name__)

ConfigSource: TypeAlias = "TrainConfig | JSONMapping | Iterable[str] | str | Path | None"

_MAPPING, _OVERRIDES = "config", "key=value"
_MISSING = object()
_LEADING_KEY = re.compile(r"[a-z]\w*(\.\w+)*(?==| is not a setting)")
_ARGUMENTS = {
    "resume": "to resume a run, use AgentTrainer(..., resume=True) or rllm train --resume RUN_DIR",
    "val": "held-out tasks are given as AgentTrainer(..., val_dataset=...) or rllm train --val",
    "sampling": "sampling.NAME is for rllm eval; training has rollout.max_tokens, rollout.temperature and others",
}
"""Names that users mistake for settings: arguments of `AgentTrainer`, and settings of `rllm eval`."""

_PREFIX = "RLLM__"
_NOT_SETTINGS = ("RLLM_STORE",)
"""Variables that share the name of a setting but mean something else: `rllm.integrations.litellm` reads this one."""


@dataclass(frozen=True, kw_only=True)
class ConfigLayer:
    """Settings from one source; a later layer overrides an earlier one."""

    name: str
    values: JSONObject
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each dotted key, if the source is a file."""


def load_config(source: ConfigSource = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Return the configuration of `source`, with `key=value` overrides applied last.

    Later layers win: the defaults; a file or mapping; the environment, where `RLLM__OPTIM__LR=1e-5` means
    `optim.lr=1e-5`; `key=value`. The environment does not change a finished `TrainConfig`. Keys of the rLLM framework
    that have no meaning for the backend are named in one warning.

    Args:
        source: a `TrainConfig`, a YAML path, a mapping (hydra's `DictConfig`, too), or a list of `key=value`.
        overrides: more `key=value`; of two values of a key the last counts, and a warning names both.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    return from_layers(layers_of(source, overrides))


def from_layers(layers: Sequence[ConfigLayer]) -> TrainConfig:
    """Return the configuration that these layers make together; raise `ConfigError` as `load_config` does."""
    translation = translate_layers(layers)
    try:
        config = TrainConfig.model_validate(translation.values)
    except ValidationError as error:
        explained = (_explain(item, translation.origins, layers) for item in error.errors())
        raise ConfigError("\n".join(explained)) from None  # the explanation replaces pydantic's own wording
    if translation.ignored:
        logger.warning(
            "settings ignored, since they have no effect with backend=%s: %s",
            config.backend,
            ", ".join(translation.ignored),
        )
    return config


def layers_of(source: ConfigSource = None, overrides: Iterable[str] = ()) -> list[ConfigLayer]:
    """Return the layers of `load_config`, first to last; raise `ConfigError` if the source cannot be read."""
    source = without_omegaconf(source)
    overrides = list(overrides)
    layers = []
    if isinstance(source, TrainConfig):
        was_set, differs = source.model_dump(exclude_unset=True), source.model_dump(exclude_defaults=True)
        layers.append(ConfigLayer(name=_MAPPING, values=_merged(was_set, differs)))
    elif isinstance(source, Mapping):
        layers.append(ConfigLayer(name=_MAPPING, values=_plain(source)))
    elif isinstance(source, str | Path):
        values, lines = read_settings(Path(source))
        layers.append(ConfigLayer(name=str(source), values=values, lines=lines))
    elif isinstance(source, Iterable):
        overrides = [*source, *overrides]
    elif source is not None:
        raise ConfigError(f"config={source!r}: use a mapping, a YAML path, or a list of key=value")
    if not isinstance(source, TrainConfig):
        _warn_misspelled_variables(_all_keys())
        found = sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIX))
        variables = [f"{_key_of_variable(name.removeprefix(_PREFIX))}={value}" for name, value in found]
        layers.append(ConfigLayer(name="environment", values=_applied(variables)))
    warn_repeated(overrides)
    layers.append(ConfigLayer(name=_OVERRIDES, values=_applied(overrides)))
    return layers


def translate_layers(layers: Sequence[ConfigLayer]) -> Translation:
    """Merge the layers, and translate keys of the rLLM framework to ours."""
    values: JSONObject = {}
    for layer in layers:
        values = _merged(values, layer.values)
    return translate(values)


def layer_that_sets(key: str, layers: Sequence[ConfigLayer]) -> ConfigLayer | None:
    """Return the last layer that sets a dotted key; `None` if all leave it at its default."""
    set_by = (layer for layer in reversed(layers) if key in layer.lines or _at(layer.values, key) is not _MISSING)
    return next(set_by, None)


@contextmanager
def locating_errors(layers: Sequence[ConfigLayer]) -> Iterator[None]:
    """Prefix a `ConfigError` raised inside with the file and line, or the environment, that set its key."""
    try:
        yield
    except ConfigError as error:
        found = _LEADING_KEY.match(str(error))
        if found is None:
            raise
        setting = found[0]
        key = translate_layers(layers).origins.get(setting, setting)
        layer = layer_that_sets(key, layers)
        if layer is None or isinstance(_at(layer.values, key), Mapping):  # a section is set in many places
            raise
        also = "" if key == setting else f"{key}, here "
        raise ConfigError(f"{_location(key, layers)}{also}{error}") from error.__cause__


def warn_repeated(overrides: Iterable[str]) -> None:
    """Warn of overrides that a later one, of the same key or of its whole section, replaces."""
    seen: dict[str, str] = {}
    for key, text in map(_key_and_text, overrides):
        for earlier, value in seen.items():
            if (earlier == key and value != text) or earlier.startswith(f"{key}."):
                logger.warning("%s=%s and %s=%s are both given: the last one is used", earlier, value, key, text)
        seen[key] = text


def parse_scalar(text: str) -> object:
    """Return a number, boolean, null or list as YAML reads it; anything else stays text."""
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 does not know 1e-5
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merged(one: JSONMapping, other: JSONMapping) -> JSONObject:
    merged = dict(one)
    for key, value in other.items():
        mine = merged.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(mine, value)
        elif isinstance(value, Mapping) and value and mine is not None:
            raise ConfigError(f"{key}={mine!r} and {key}.{next(iter(value))} are both set: keep one of the two")
        else:
            merged[key] = value
    return merged


def _plain(mapping: JSONMapping) -> JSONObject:
    items = ((str(key), without_omegaconf(value)) for key, value in mapping.items())
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in items}


def _key_of_variable(name: str) -> str:
    """Return the dotted key in lower case, as settings are; the name of a role is the user's and keeps its case."""
    section, *rest = name.split("__")
    own = rest[:1] if section.lower() == "roles" else []
    return ".".join([section.lower(), *own, *(part.lower() for part in rest[len(own) :])])


def _warn_misspelled_variables(keys: Iterable[str]) -> None:
    """Warn of variables that nothing reads but that resemble a setting, such as `RLLM_OPTIM_LR`."""
    similar = {f"RLLM_{key.upper().replace('.', '_')}": key for key in keys}
    for name in sorted(os.environ):
        key = similar.get(name.upper().replace("__", "_"))
        if key is not None and name not in _NOT_SETTINGS and not name.startswith(_PREFIX):
            variable = _PREFIX + key.upper().replace(".", "__")
            logger.warning("environment variable %s is not read: to set %s use %s", name, key, variable)


def _applied(overrides: Iterable[str]) -> JSONObject:
    """Return `key=value` overrides as nested values. Settings that are text stay text; the rest is read as YAML."""
    values: JSONObject = {}
    for override in overrides:
        key, text = _key_and_text(override)
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise ConfigError(f"{override!r}: {parent!r} is a value, not a section")
        section[last] = text if _is_text(key) and text != "null" else parse_scalar(text)
    return values


def _key_and_text(override: str) -> tuple[str, str]:
    """Return the two sides of `key=value`; the plus that hydra requires before a new key is dropped."""
    if not isinstance(override, str):
        raise ConfigError(f"{override!r} is not a setting: use the text key=value, such as optim.lr=1e-5")
    key, separator, text = override.partition("=")
    key = key.strip().lstrip("+")
    if not separator or not key:
        raise ConfigError(f"{override!r} has no {'value' if key else 'key'}: use key=value, such as optim.lr=1e-5")
    return key, text


def _is_text(key: str) -> bool:
    """Return whether this setting, or the one that a key of the rLLM framework maps to, is a string or a path."""
    model: object = TrainConfig
    for part in our_key(key).split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = field.annotation
    return model in (str, str | None, Path | None)


def _explain(error: ErrorDetails, origins: Mapping[str, str], layers: Sequence[ConfigLayer]) -> str:
    """Return one pydantic error as location, key as the user wrote it, value and remedy."""
    path = ".".join(str(part) for part in error["loc"])
    location = _location(origins.get(path, path), layers)
    value = error["input"]
    is_unknown = error["type"] == "extra_forbidden"
    if is_unknown or (isinstance(value, Mapping) and error["type"].endswith("_type")):
        written = [key for key, _ in leaves({path: value})]
        names = f"{', '.join(written)} {'is not a setting' if len(written) == 1 else 'are not settings'}"
        kind = "a list" if error["type"] == "list_type" else "one value"
        return f"{location}{names}; {_hint(error['loc']) if is_unknown else f'{path} is one, with {kind}'}"
    if path in origins:
        path = f"{origins[path]}, here {path}"
    if error["type"] == "model_type":
        return (
            f"{location}{path}={value!r}: this is a section, whose settings are {', '.join(_known_keys(error['loc']))}"
        )
    remedies = {"list_type": f"; write it as [{value}]"}
    if error["loc"][-1] == "algorithm":
        remedies["dict_type"] = f"; write it as {path}.name={value}"
    remedy = remedies.get(error["type"], "") if isinstance(value, str) else ""
    return f"{location}{path}={value!r}: {error['msg'][0].lower()}{error['msg'][1:]}{remedy}"


def _location(key: str, layers: Sequence[ConfigLayer]) -> str:
    """Return the file and line, or the environment, that set a key; nothing if the user has the value in view."""
    while (layer := layer_that_sets(key, layers)) is None and "." in key:
        key = key.rpartition(".")[0]  # an item of a list
    if layer is None or layer.name in (_MAPPING, _OVERRIDES):
        return ""
    line = layer.lines.get(key)
    return f"{layer.name}: " if line is None else f"{layer.name}, line {line}: "


def _at(values: object, key: str) -> object:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return _MISSING
        values = values[part]
    return values


def _hint(path: tuple[int | str, ...]) -> str:
    """Return a hint at the setting that an unknown key may have meant."""
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
    return suggestion(key, known)


def _all_keys() -> list[str]:
    sections = {section: _known_keys((section,)) for section in _known_keys(())}
    return [f"{section}.{key}" for section, keys in sections.items() for key in keys] + [
        key for key, keys in sections.items() if not keys
    ]


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the settings of a section, or nothing for a setting that is not a section."""
    kind: object = TrainConfig
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(part)].annotation
        elif get_origin(kind) is dict:  # keys are names that the user chooses
            kind = get_args(kind)[1]
        else:
            return []
    return sorted(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
