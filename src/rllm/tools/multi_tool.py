"""Several tools behind one interface, dispatched by the name of the call, and the registry of short names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rllm.errors import ConfigError, shown
from rllm.registry import load_object, resolve
from rllm.tools.tool_base import Function, Tool, ToolCall, ToolOutput
from rllm.types import JSONObject

__all__ = ["MultiTool", "ToolRegistry", "tool_registry"]


class ToolRegistry(Mapping[str, type[Tool]]):
    """Short names of tool classes; those given as `package.module:Class` are imported on first use."""

    def __init__(self, tools: Mapping[str, type[Tool] | str]) -> None:
        self._tools = dict(tools)

    def register(self, name: str, tool: type[Tool] | str) -> None:
        """Give a short name to a class or a `package.module:Class`, in this process."""
        self._tools[name] = tool

    def instantiate(self, name: str, **settings: object) -> Tool:
        """Return the tool for a short name or a `package.module:Class`.

        Raises:
            ConfigError: if the tool does not exist (the message lists the known ones), or it does not create a tool.
        """
        cls = self[name] if name in self._tools else resolve(name, dict.fromkeys(self._tools, ""), kind="tool")
        return _create(cls, name, **settings)

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
        "calculator": "rllm.tools.calculator:Calculator",
        "local_search": "rllm.tools.local_search:LocalSearch",
        "python": "rllm.tools.python_tool:PythonInterpreter",
    }
)


class MultiTool:
    """The tools of one agent.

    Args:
        tools: each a tool, a class of tools, a function, a short name of `tool_registry`, or `package.module:Class`.
        tool_map: names to tool classes, in place of `tools`; each class is called with `name=`.

    Raises:
        ConfigError: if both are given, two tools share a name, or one cannot be created.
    """

    def __init__(
        self, tools: Sequence[Tool | str | Function] | None = None, tool_map: Mapping[str, type[Tool]] | None = None
    ) -> None:
        if tools is not None and tool_map is not None:
            raise ConfigError("give either `tools` or `tool_map`, not both")
        if isinstance(tools, str) or callable(tools):
            raise ConfigError(f"tools={shown(tools)}: give a list of tools, even for a single one")
        created = [_tool(tool) for tool in tools or ()]
        created += [_create(cls, name, name=name) for name, cls in (tool_map or {}).items()]
        self.tools = {tool.name: tool for tool in created}
        if len(self.tools) < len(created):
            names = [tool.name for tool in created]
            raise ConfigError(f"tool names {names}: two tools have the same name; rename one with `name=`")

    @property
    def json(self) -> list[JSONObject]:
        """The tools as chat requests list them."""
        return [tool.json for tool in self.tools.values()]

    def __call__(self, tool_name: str, **arguments: object) -> ToolOutput:
        """Call one tool and wait. An unknown name is an error output."""
        tool = self.tools.get(tool_name)
        return tool(**arguments) if tool else self._unknown(tool_name)  # type: ignore[call-overload]

    async def call(self, call: ToolCall) -> ToolOutput:
        """Call one tool with the arguments that a model sent. An unknown name is an error output."""
        tool = self.tools.get(call.name)
        return await tool.call(call.arguments) if tool else self._unknown(call.name)

    def _unknown(self, name: str) -> ToolOutput:
        return ToolOutput(name=name, error=f"there is no tool {name!r}; use one of {', '.join(sorted(self.tools))}")


def _tool(tool: Tool | str | Function) -> Tool:
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, str):
        return tool_registry.instantiate(tool)
    if isinstance(tool, type):
        if not issubclass(tool, Tool):
            raise ConfigError(
                f"tools: {tool.__name__} is a class, but not a subclass of Tool: pass a Tool or a function"
            )
        return _create(tool, tool.__name__)
    if callable(tool):
        return Tool(function=tool)
    raise ConfigError(f"tools: {tool!r}: pass a Tool, a function, or the name of a tool")


def _create(cls: Function, label: str, /, **settings: object) -> Tool:
    """Return the tool that a class or another factory creates.

    Raises:
        ConfigError: if it does not create one.
    """
    remedy = "name a subclass of Tool, or put the function or the tool itself into `tools`"
    try:
        tool = None if isinstance(cls, Tool) else cls(**settings)
    except TypeError as error:
        if isinstance(cls, type):
            raise
        raise ConfigError(f"tool {label!r} is {shown(cls)}: {error}; {remedy}") from error
    if not isinstance(tool, Tool):
        raise ConfigError(f"tool {label!r} is {shown(cls)}, which creates no tool: {remedy}")
    return tool
