"""A parcel clerk made of ready parts: `ToolAgent` calls the tools of an MCP server, and `ToolEnvironment` runs the calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm.tools.mcp_tool import MCPServer, MCPTool
from rllm.types import Task

SERVER = MCPServer(name="parcels", command=sys.executable, args=[str(Path(__file__).with_name("server.py"))])
SYSTEM = "Answer with a number."


def agent_args(tools: Sequence[MCPTool]) -> dict[str, Any]:
    """Settings of the agent. The chat template lists the tools, as the model expects them."""
    return {"system_prompt": SYSTEM, "tools": tools, "schemas_in_prompt": False}


def env_args(tools: Sequence[MCPTool]) -> dict[str, Any]:
    """Settings of the environment: the same tools, and the reward of an answer."""
    return {"tools": tools, "reward_fn": names_the_number, "max_steps": 4}


def names_the_number(task: Task, answer: str) -> float:
    """1.0 if the answer's last number is the right one, else 0.0."""
    return float(re.findall(r"\d+", answer)[-1:] == [str(task["answer"])])
