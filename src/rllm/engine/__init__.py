"""Tasks to episodes: run an agent many times at once, and join what it earned with what it sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.engine.agent_execution_engine import AgentExecutionEngine as AgentExecutionEngine
    from rllm.engine.agent_execution_engine import AsyncAgentExecutionEngine as AsyncAgentExecutionEngine
    from rllm.engine.agent_function_engine import AgentFunctionEngine as AgentFunctionEngine
    from rllm.engine.agent_workflow_engine import AgentWorkflowEngine as AgentWorkflowEngine
    from rllm.engine.runner import RolloutRunner as RolloutRunner
    from rllm.inference.engine import ModelOutput as ModelOutput
    from rllm.inference.engine import RolloutEngine as RolloutEngine
    from rllm.inference.openai_engine import OpenAIEngine as OpenAIEngine

__all__ = [
    "AgentExecutionEngine",
    "AgentFunctionEngine",
    "AgentWorkflowEngine",
    "AsyncAgentExecutionEngine",
    "ModelOutput",
    "OpenAIEngine",
    "RolloutEngine",
    "RolloutRunner",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AgentExecutionEngine": "rllm.engine.agent_execution_engine",
        "AgentFunctionEngine": "rllm.engine.agent_function_engine",
        "AgentWorkflowEngine": "rllm.engine.agent_workflow_engine",
        "AsyncAgentExecutionEngine": "rllm.engine.agent_execution_engine",
        "ModelOutput": "rllm.inference.engine",
        "OpenAIEngine": "rllm.inference.openai_engine",
        "RolloutEngine": "rllm.inference.engine",
        "RolloutRunner": "rllm.engine.runner",
    },
)
