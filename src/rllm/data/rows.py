"""What a row may be, in memory and in a file that keeps it without loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError, shown
from rllm.types import Task

_ATOMS = (type(None), bool, int, float, str)


def as_task(row: Any, where: str) -> Task:
    """A copy of the row as a dict.

    Raises:
        ConfigError: if it is no mapping; the message begins with `where`.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {shown(row)}: use an object with a field for each argument")
    return dict(row)


def json_value(value: Any, where: str) -> Any:
    """The value in JSON's own types: numpy's numbers and arrays as numbers and lists, tuples as lists.

    Raises:
        ConfigError: if JSON cannot hold it; the message begins with `where`, extended by the path inside the value.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping):
        unnamed = next((key for key in value if type(key) is not str), None)
        if unnamed is not None:
            raise ConfigError(f"{where} has the key {unnamed!r}: JSON has only text for keys, so use {str(unnamed)!r}")
        return {key: json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), where)
    raise ConfigError(
        f"{where} is {shown(value)}, and JSON has nothing of type {type(value).__name__!r}: "
        "make it text, a number, a list or an object"
    )
