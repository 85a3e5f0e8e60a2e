"""Copies of messages and tasks that later changes to the originals cannot reach."""

from __future__ import annotations

import copy
from typing import Any

_ATOMS = frozenset({str, int, float, bool, type(None)})


def snapshot(value: Any) -> Any:
    """Copy the dicts, lists, tuples, sets and NumPy arrays that a value consists of.

    Everything else in it, such as texts and clients, is shared.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list):
        return [snapshot(item) for item in value]
    if type(value) is tuple:
        return tuple([snapshot(item) for item in value])
    if isinstance(value, set | bytearray) or _is_array(value):
        return copy.copy(value)
    return value


def _is_array(value: Any) -> bool:
    """Return True for an array that can copy itself: not a tensor, nor a lazily read file."""
    return hasattr(type(value), "__array__") and hasattr(type(value), "__copy__")
