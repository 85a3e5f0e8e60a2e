"""A configuration from whatever the user has: nothing, a mapping, a YAML file, or a list of key=value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

from rllm.errors import ConfigError
from rllm.trainer.config.schema import TrainConfig

ConfigSource: TypeAlias = "TrainConfig | Mapping[str, Any] | Iterable[str] | str | Path | None"


def load_config(source: ConfigSource = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """The configuration of `source` (a YAML path, a mapping, a list of `key=value`), with `key=value` overrides last.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    if isinstance(source, TrainConfig):
        values = source.model_dump()
    elif source is None:
        values = {}
    elif isinstance(source, Mapping):
        values = _plain(source)
    elif isinstance(source, str | Path):
        values = _from_yaml(Path(source))
    elif isinstance(source, Iterable):
        values = {}
        overrides = [*source, *overrides]
    else:
        raise ConfigError(f"config={source!r}: use a mapping, a YAML path, or a list of key=value")
    for override in overrides:
        _apply(values, override)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from error


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain dicts of a nested mapping."""
    return {str(key): _plain(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config={str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(values or {}, dict):
        raise ConfigError(f"config={str(path)!r} holds a {type(values).__name__}: use `key: value` lines")
    return values or {}


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key. Numbers, booleans, null and lists mean what they do in YAML; settings that are text keep it."""
    if not isinstance(override, str):
        raise ConfigError(f"{override!r} is not a setting: use the text key=value, such as optim.lr=1e-5")
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{override!r} is not a setting: use key=value, such as optim.lr=1e-5")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"{override!r}: {parent!r} is a value, not a section")
    values[last] = text if _is_text((*parents, last)) and text != "null" else _scalar(text)


def _is_text(path: tuple[str, ...]) -> bool:
    """Whether this setting is a string or a path."""
    model: Any = TrainConfig
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = field.annotation
    return model in (str, Path | None)


def _scalar(text: str) -> Any:
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


def _explain(error: Any) -> str:
    """One pydantic error as key, value and remedy."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path} is not a setting; {_hint(error['loc'])}"
    return f"{path}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _hint(path: tuple[Any, ...]) -> str:
    """What may have been meant by a key that is none."""
    key, known = str(path[-1]), _known_keys(path[:-1])
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    elsewhere = [f"{section}.{key}" for section in _known_keys(()) if key in _known_keys((section,))]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return f"known here: {', '.join(known)}"


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    """The settings of a section; none if it is not a section but a value."""
    model: type[BaseModel] = TrainConfig
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)
