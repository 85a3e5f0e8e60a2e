"""A file of settings, and the line that each stands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rllm.errors import ConfigError


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """What the file says, and by dotted key in which line.

    Raises:
        ConfigError: naming the file, and where in it the mistake is.
    """
    try:
        loader = _OneValueEach(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
        lines = dict(_lines(node))
    except OSError as error:
        remedy = "; a file of settings belongs here, and key=value into a list" if "=" in str(path) else ""
        raise ConfigError(f"config={str(path)!r}: {error.strerror}{remedy}") from error
    except yaml.MarkedYAMLError as error:
        mark, said = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{path}{place} is not valid YAML: {said}; `rllm config` shows such a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}; save the file as UTF-8") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values or {}, dict):
        raise ConfigError(f"config={str(path)!r} holds a {type(values).__name__}: use `key: value` lines")
    return values or {}, lines


class _OneValueEach(yaml.SafeLoader):
    """YAML in which no mapping has a key twice; of two values the parser would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _lines(value, f"{name}.")
