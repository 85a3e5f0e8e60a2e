"""Rollouts: run agents on tasks, many at a time, and join their rewards with the tokens that they sampled."""

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

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.engine.agent_execution_engine": "AgentExecutionEngine AsyncAgentExecutionEngine",
        "rllm.engine.agent_function_engine": "AgentFunctionEngine",
        "rllm.engine.agent_workflow_engine": "AgentWorkflowEngine",
        "rllm.engine.runner": "RolloutRunner",
        "rllm.inference.engine": "ModelOutput RolloutEngine",
        "rllm.inference.openai_engine": "OpenAIEngine",
    },
)
