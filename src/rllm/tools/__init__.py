"""Tools for agents: functions, a Python sandbox, a search over documents, any MCP server.

`tool_base` has `Tool`, whose JSON schema comes from a signature; `multi_tool` has the registry of short names, and
dispatches calls by name. `python_tool` runs code in a sandbox; `local_search` and `calculator` are ready-made;
`mcp_tool` connects to servers.
"""

from rllm.tools.multi_tool import MultiTool, ToolRegistry, tool_registry
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput

__all__ = ["MultiTool", "Tool", "ToolCall", "ToolOutput", "ToolRegistry", "tool_registry"]
