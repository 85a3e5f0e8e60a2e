"""Settings files in YAML, read within bounds, since a run folder may come from an untrusted source.

Aliases let a few hundred bytes stand for billions of nodes, so nodes are counted as often as aliases repeat them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

import yaml

from rllm.errors import ConfigError
from rllm.types import JSONMapping, JSONObject

MAX_BYTES = 4_000_000
MAX_NODES = 100_000
"""Keys and values, each as often as aliases repeat it; the largest settings file has a few hundred."""


def read_settings(path: Path) -> tuple[JSONObject, dict[str, int]]:
    """Return the values of a settings file, and their lines by dotted key; raise `ConfigError` naming the mistake."""
    try:
        loader = _SettingsLoader(_text_of(path))
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
        lines = dict(_lines(node))
    except OSError as error:
        remedy = "; a file of settings belongs here, and key=value into a list" if "=" in str(path) else ""
        raise ConfigError(f"config={str(path)!r}: {error.strerror}{remedy}") from error
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}; `rllm config` shows such a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}; save the file as UTF-8") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values or {}, dict):
        raise ConfigError(f"config={str(path)!r} holds a {type(values).__name__}: use `key: value` lines")
    return values or {}, lines


def leaves(mapping: JSONMapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of a nested mapping with their values; an empty section is a value itself."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes: a settings file has a few thousand")
    return data.decode("utf-8")


class _SettingsLoader(yaml.SafeLoader):
    """YAML loader with a limit on nodes that refuses repeated keys: the parser would keep the last value silently."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._sizes: dict[int, int] = {}
        """Nodes in each node that is composed, by its `id`."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before = self._num_nodes
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias refers to a node that contains it", mark)
        self._num_nodes += self._sizes[id(node)] if is_alias else 1
        if self._num_nodes > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_NODES:,} values, aliases repeated", mark)
        self._sizes.setdefault(id(node), self._num_nodes - before)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is set twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _lines(value, f"{name}.")
