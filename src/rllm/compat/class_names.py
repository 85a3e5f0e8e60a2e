"""Short names of ready-made classes, as configurations of the rLLM framework use them."""

from __future__ import annotations

from rllm.agents.agent import BaseAgent
from rllm.agents.math_agent import MathAgent
from rllm.agents.tool_agent import ToolAgent
from rllm.compat.frozenlake_agent import FrozenLakeAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.single_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.workflows.multi_turn_workflow import CumulativeWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
from rllm.workflows.simple_workflow import SimpleWorkflow
from rllm.workflows.workflow import Workflow

AGENT_CLASS_MAPPING: dict[str, type[BaseAgent]] = {
    "math_agent": MathAgent,
    "tool_agent": ToolAgent,
    "frozenlakeagent": FrozenLakeAgent,
}
ENV_CLASS_MAPPING: dict[str, type[BaseEnv]] = {
    "math": SingleTurnEnvironment,
    "code": SingleTurnEnvironment,
    "single_turn_env": SingleTurnEnvironment,
    "tool": ToolEnvironment,
    "frozenlake": GridWorldEnv,
}
WORKFLOW_CLASS_MAPPING: dict[str, type[Workflow]] = {
    "simple": SimpleWorkflow,
    "single_turn": SingleTurnWorkflow,
    "multi_turn": MultiTurnWorkflow,
    "cumulative": CumulativeWorkflow,
}
