"""The tools that have a short name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rllm.registry import load_object, resolve
from rllm.tools.tool_base import Tool

__all__ = ["ToolRegistry", "tool_registry"]


class ToolRegistry(Mapping[str, type[Tool]]):
    """Short names to tool classes; those given as `package.module:Class` are imported when they are asked for."""

    def __init__(self, tools: Mapping[str, type[Tool] | str]) -> None:
        self._tools = dict(tools)

    def register(self, name: str, tool: type[Tool] | str) -> None:
        """Give a short name to a class or a `package.module:Class`, in this process."""
        self._tools[name] = tool

    def instantiate(self, name: str, **settings: Any) -> Tool:
        """The tool behind a short name or a `package.module:Class`.

        Raises:
            ConfigError: if there is no such tool; the message lists the known ones.
        """
        cls = self[name] if name in self._tools else resolve(name, dict.fromkeys(self._tools, ""), kind="tool")
        tool: Tool = cls(**settings)
        return tool

    def __getitem__(self, name: str) -> type[Tool]:
        known = self._tools[name]
        cls: type[Tool] = load_object(known, kind="tool") if isinstance(known, str) else known
        return cls

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


tool_registry = ToolRegistry(
    {
        "calculator": "rllm.tools.calculator_tool:Calculator",
        "local_search": "rllm.tools.local_search:LocalSearch",
        "python": "rllm.tools.python_tool:PythonInterpreter",
    }
)
