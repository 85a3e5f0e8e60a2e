"""Several tools behind one interface, dispatched by the name of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError, shown
from rllm.tools.registry import made_by, tool_registry
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput

__all__ = ["MultiTool"]


class MultiTool:
    """The tools of one agent.

    Args:
        tools: each a tool, a class of tools, a function, a short name of `tool_registry`, or `package.module:Class`.
        tool_map: names to tool classes, in place of `tools`; each class is called with `name=`.

    Raises:
        ConfigError: if both are given, two tools share a name, or one cannot be made.
    """

    def __init__(
        self,
        tools: Sequence[Tool | str | Callable[..., Any]] | None = None,
        tool_map: Mapping[str, type[Tool]] | None = None,
    ) -> None:
        if tools is not None and tool_map is not None:
            raise ConfigError("give either `tools` or `tool_map`, not both")
        if isinstance(tools, str) or callable(tools):
            raise ConfigError(f"tools={shown(tools)}: give a list of tools, also of a single one")
        made = [_tool(tool) for tool in tools or ()] + [
            made_by(cls, name, name=name) for name, cls in (tool_map or {}).items()
        ]
        self.tools = {tool.name: tool for tool in made}
        if len(self.tools) < len(made):
            names = [tool.name for tool in made]
            raise ConfigError(f"tool names {names}: each tool needs a name of its own; give one with `name=`")

    @property
    def json(self) -> list[dict[str, Any]]:
        """The tools as chat requests list them."""
        return [tool.json for tool in self.tools.values()]

    def __call__(self, tool_name: str, **arguments: Any) -> ToolOutput:
        """Call one tool and wait. An unknown name is an error output."""
        tool = self.tools.get(tool_name)
        return tool(**arguments) if tool else self._unknown(tool_name)

    async def call(self, call: ToolCall) -> ToolOutput:
        """Call one tool with what a model sent. An unknown name is an error output."""
        tool = self.tools.get(call.name)
        return await tool.call(call.arguments) if tool else self._unknown(call.name)

    def _unknown(self, name: str) -> ToolOutput:
        return ToolOutput(name=name, error=f"there is no tool {name!r}; there are {sorted(self.tools)}")


def _tool(tool: Tool | str | Callable[..., Any]) -> Tool:
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, str):
        return tool_registry.instantiate(tool)
    if isinstance(tool, type):
        if not issubclass(tool, Tool):
            raise ConfigError(f"tools: {tool.__name__} is a class, and not one of tools; pass a tool or a function")
        return made_by(tool, tool.__name__)
    if callable(tool):
        return Tool(function=tool)
    raise ConfigError(f"tools: {tool!r} is neither a tool, nor a function, nor a name")
