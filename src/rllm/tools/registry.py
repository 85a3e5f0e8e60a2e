"""The tools that have a short name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rllm.errors import ConfigError, shown
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
        """Return the tool for a short name or a `package.module:Class`.

        Raises:
            ConfigError: if there is no such tool (the message lists the known ones), or it does not create a tool.
        """
        cls = self[name] if name in self._tools else resolve(name, dict.fromkeys(self._tools, ""), kind="tool")
        return made_by(cls, name, **settings)

    def __getitem__(self, name: str) -> type[Tool]:
        known = self._tools[name]
        cls: type[Tool] = load_object(known, kind="tool") if isinstance(known, str) else known
        return cls

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


def made_by(cls: Any, label: str, /, **settings: Any) -> Tool:
    """Return the tool that a class or another factory creates.

    Raises:
        ConfigError: if it does not create one, as a function or a tool does not.
    """
    remedy = "name a class of tools, or put the function or the tool itself into `tools`"
    try:
        tool = None if isinstance(cls, Tool) else cls(**settings)
    except TypeError as error:
        if isinstance(cls, type):
            raise
        raise ConfigError(f"tool {label!r} is {shown(cls)}: {error}; {remedy}") from error
    if not isinstance(tool, Tool):
        raise ConfigError(f"tool {label!r} is {shown(cls)}, which makes no tool: {remedy}")
    return tool


tool_registry = ToolRegistry(
    {
        "calculator": "rllm.tools.calculator:Calculator",
        "local_search": "rllm.tools.local_search:LocalSearch",
        "python": "rllm.tools.python_tool:PythonInterpreter",
    }
)
