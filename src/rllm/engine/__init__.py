"""Rollouts: run agents on tasks, many at a time, and join their rewards with the tokens that they sampled.

Read `request` (one rollout to make) and `runner` (many at once) first, then an engine: `agent_execution_engine` (agent
and environment), `agent_workflow_engine` or `agent_function_engine`. Around them:

* `capture`, `recording_engine`: record a rollout's calls, over HTTP or in this process; `join` matches them with steps.
* `signature`, `validation`: checks of what users' functions accept and return.
* `scoring`: rewards of whole groups and of named parts. `failures`: retries, and episodes of failed rollouts.
* `event_loop`: the loop that rollouts share, and Ctrl-C. `episode_log`: a file with a line for each episode.
* `ray_actors`, `ray_cluster`: rollouts in processes on other machines.
"""

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
