"""Reference of the settings, read from the schema: meaning, allowed values and default of each, for people and editors.

Algorithms are not known at this layer: functions take the table of their short names (`rllm.algorithms.ALGORITHMS`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TypeGuard, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, TypeAdapter

from rllm.config.loading import ConfigLayer, layer_that_sets, translate_layers
from rllm.config.schema import TrainConfig
from rllm.config.yaml_file import leaves
from rllm.registry import field_docs, resolve
from rllm.types import JSONMapping, JSONObject

HINT = "# yaml-language-server: $schema=rllm.schema.json"
"""First line by which a YAML file names its schema to an editor; `rllm config --json-schema` prints the schema."""

_WIDTH = 116
_NO_BREAK = "\N{NO-BREAK SPACE}"
_NAMES = {"integer": "whole number", "boolean": "true | false", "object": "mapping", "array": "list", "string": "text"}
_BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting."""

    key: str
    """Dotted key; `NAME` stands for a name that the user chooses."""
    default: object
    allowed: str
    """Allowed values, in words."""
    doc: str
    optional: bool = False
    """Absent from the defaults: a setting of one algorithm, or of a role."""


@dataclass(frozen=True, kw_only=True)
class SettingOrigin:
    """The value of one setting in a configuration, and its source."""

    key: str
    value: object
    origin: str
    """`default`, or the name of the layer that set it."""


def settings(algorithms: Mapping[str, str], algorithm: str = "grpo") -> list[Setting]:
    """Return all settings in the order of the schema, including the settings of this algorithm, which must exist."""
    return list(_of_model(TrainConfig, "", partial(_of_algorithm, algorithms, algorithm), optional=False))


def origins(
    config: TrainConfig, layers: Sequence[ConfigLayer], algorithm: JSONMapping, *, rate_origin: str | None = None
) -> list[SettingOrigin]:
    """Return the value and origin of every setting, in the order of the schema.

    Args:
        config: the trainer's final configuration.
        layers: sources of the configuration.
        algorithm: all settings of the algorithm, also those that were not set.
        rate_origin: origin of `optim.lr`, if no layer set it.
    """
    written = translate_layers(layers).origins

    def origin(key: str) -> str:
        if key == "num_steps" and config.num_epochs is not None:
            return "num_epochs"
        if key == "optim.lr" and rate_origin is not None:
            return rate_origin
        name = written.get(key, key)
        layer = layer_that_sets(name, layers)
        source = "default" if layer is None else layer.name
        return f"{source}, as {name}" if name != key else source

    values = config.model_dump(mode="json")
    values["algorithm"] = {**values["algorithm"], **algorithm}
    return [SettingOrigin(key=key, value=value, origin=origin(key)) for key, value in leaves(values)]


def section_docs() -> dict[str, str]:
    """Return the description of each section by its name, and of the whole configuration by `""`."""
    kinds = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    sections = {name: kind for name, kind in kinds.items() if _is_section(kind)}
    docs = {name: inspect.getdoc(kind) or "" for name, kind in sections.items()}
    open_ones = {name: TrainConfig.model_fields[name].description or "" for name in ("algorithm", "roles")}
    return {"": inspect.getdoc(TrainConfig) or "", **docs, **open_ones}


def matching(found: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    """Return the settings of these keys and sections; if there are none, those whose key or meaning contains a word."""
    chosen = [item for item in found if any(f"{item.key}.".startswith(f"{word}.") for word in words)]
    return chosen or [item for item in found if any(word in item.key or word in item.doc for word in words)]


def as_yaml(found: Sequence[Setting], docs: Mapping[str, str]) -> str:
    """Return a YAML file that sets each setting to its default, with explanations; optional settings are comments."""
    lines: list[str] = []
    above: tuple[str, ...] = ()
    for item in found:
        *sections, name = item.key.split(".")
        mark = "# " if item.optional else ""
        for depth, section in enumerate(sections):
            if tuple(sections[: depth + 1]) != above[: depth + 1]:
                lines += ["", *_comment(docs.get(section, ""), depth), f"{'  ' * depth}{mark}{section}:"]
        above = tuple(sections)
        indent = "  " * len(sections)
        allowed = f"[{item.allowed}]"
        if len(allowed) < _WIDTH // 2:  # in one line
            allowed = allowed.replace(" ", _NO_BREAK)
        value = yaml.safe_dump(item.default, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
        lines += [*_comment(f"{item.doc} {allowed}", len(sections)), f"{indent}{mark}{name}: {value}"]
    return "\n".join(lines).strip() + "\n"


def json_schema(algorithms: Mapping[str, str]) -> JSONObject:
    """Return a JSON Schema of configuration files, for editors (https://json-schema.org)."""
    schema = TrainConfig.model_json_schema()
    properties: dict[str, JSONObject] = {}
    for name in algorithms:
        kind = resolve(name, algorithms, kind="algorithm.name")
        docs = field_docs(kind)
        properties |= {field.name: {"description": docs.get(field.name, "")} for field in fields(kind)}
    schema["properties"]["algorithm"] = {
        "type": "object",
        "description": schema["properties"]["algorithm"].get("description", ""),
        "properties": {"name": {"type": "string", "examples": sorted(algorithms)}, **properties},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rllm"}


def _of_model(
    model: type[BaseModel], prefix: str, of_algorithm: Callable[[], Iterator[Setting]], *, optional: bool
) -> Iterator[Setting]:
    schemas = _schemas(model)
    for name, field in model.model_fields.items():
        kind, key = field.annotation, f"{prefix}{name}"
        if key == "algorithm":
            yield from of_algorithm()
        elif _is_section(kind):
            yield from _of_model(kind, f"{key}.", of_algorithm, optional=optional)
        elif get_origin(kind) is dict and _is_section(get_args(kind)[1]):
            yield from _of_model(get_args(kind)[1], f"{key}.NAME.", of_algorithm, optional=True)
        else:
            yield Setting(
                key=key,
                default=_plain(field.get_default(call_default_factory=True)),
                allowed=_allowed(schemas[name]),
                doc=" ".join((field.description or "").split()),
                optional=optional,
            )


@cache
def _schemas(model: type[BaseModel]) -> Mapping[str, JSONMapping]:
    """Return the JSON schemas of a section's settings, which pydantic takes milliseconds to make."""
    schemas: Mapping[str, JSONMapping] = model.model_json_schema()["properties"]
    return schemas


def _of_algorithm(algorithms: Mapping[str, str], name: str) -> Iterator[Setting]:
    yield Setting(
        key="algorithm.name",
        default=name,
        allowed=f"{' | '.join(sorted(algorithms))} | package.module:Class",
        doc="Way from rewards to advantages, and from advantages to a loss.",
    )
    kind = resolve(name, algorithms, kind="algorithm.name")
    hints, docs = get_type_hints(kind), field_docs(kind)
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        allowed = _allowed(TypeAdapter(hints[field.name]).json_schema())
        yield Setting(
            key=f"algorithm.{field.name}",
            default=_plain(default),
            allowed=allowed,
            doc=docs.get(field.name, ""),
            optional=True,
        )


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _allowed(schema: JSONMapping) -> str:
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_allowed, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum") or [schema["const"]]))
    if schema.get("type") == "array":
        return f"list of {_allowed(schema.get('items', {}))}"
    name = (
        "path" if schema.get("format") == "path" else _NAMES.get(schema.get("type", ""), schema.get("type", "anything"))
    )
    bounds = " and ".join(form.format(schema[bound]) for bound, form in _BOUNDS.items() if bound in schema)
    return f"{name} {bounds}".strip()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _comment(text: str, depth: int) -> list[str]:
    indent = "  " * depth
    lines = textwrap.wrap(text, _WIDTH - len(indent), break_on_hyphens=False)  # a value such as all-linear is one word
    return [f"{indent}# {line.replace(_NO_BREAK, ' ')}" for line in lines]
