"""Rollouts of any shape, with several agents or several attempts.

Read `workflow.py` first: `Workflow`, whose `run` is the rollout. `interaction.py` is the turn loop of an agent in an
environment, used by `multi_turn_workflow.py` and by the agent engine; `environment.py` creates, calls and closes
environments; `simple_workflow.py` asks the model once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.types import TerminationReason as TerminationReason
    from rllm.workflows.multi_turn_workflow import CumulativeWorkflow as CumulativeWorkflow
    from rllm.workflows.multi_turn_workflow import MultiTurnWorkflow as MultiTurnWorkflow
    from rllm.workflows.multi_turn_workflow import SingleTurnWorkflow as SingleTurnWorkflow
    from rllm.workflows.simple_workflow import SimpleWorkflow as SimpleWorkflow
    from rllm.workflows.workflow import TerminationEvent as TerminationEvent
    from rllm.workflows.workflow import Workflow as Workflow

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.types": "TerminationReason",
        "rllm.workflows.multi_turn_workflow": "CumulativeWorkflow MultiTurnWorkflow SingleTurnWorkflow",
        "rllm.workflows.simple_workflow": "SimpleWorkflow",
        "rllm.workflows.workflow": "TerminationEvent Workflow",
    },
)
