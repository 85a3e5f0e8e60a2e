"""A tool call as tools receive it: a name, and arguments that are parsed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """One call that a model asks for."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """`name` and `arguments`, as an object of its own; OpenAI's format has the arguments as JSON text."""
        return {"name": self.name, "arguments": dict(self.arguments)}
