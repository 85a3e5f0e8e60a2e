"""Settings that would have no effect, refused by name: whoever sets one counts on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rllm.errors import ConfigError


def refuse_changes(section: Any, prefix: str, names: Iterable[str], why: str) -> None:
    """
    Raises:
        ConfigError: if one of these settings of a section is not at its default.
    """
    defaults = type(section)()
    for name in names:
        value = getattr(section, name)
        if value != getattr(defaults, name):
            raise ConfigError(f"{prefix}.{name}={value!r} would have no effect {why}")
