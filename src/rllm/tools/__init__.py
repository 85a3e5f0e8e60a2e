"""Tools for agents: functions, a Python sandbox, a search over documents, any MCP server.

`tool_base` has `Tool`, whose JSON schema `arguments` reads from a signature; `registry` maps names to tools and
`multi_tool` dispatches calls by name. `python_tool` runs code in `sandbox`; `local_search` and `calculator` are ready-
made; `mcp` connects to servers.
"""

from rllm.tools.multi_tool import MultiTool
from rllm.tools.registry import ToolRegistry, tool_registry
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput

__all__ = ["MultiTool", "Tool", "ToolCall", "ToolOutput", "ToolRegistry", "tool_registry"]
