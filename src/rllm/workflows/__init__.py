"""Several agents, or several tries, in one rollout: `Workflow`, and the usual ones ready-made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.types import TerminationReason as TerminationReason
    from rllm.workflows.cumulative_workflow import CumulativeWorkflow as CumulativeWorkflow
    from rllm.workflows.multi_turn_workflow import MultiTurnWorkflow as MultiTurnWorkflow
    from rllm.workflows.simple_workflow import SimpleWorkflow as SimpleWorkflow
    from rllm.workflows.single_turn_workflow import SingleTurnWorkflow as SingleTurnWorkflow
    from rllm.workflows.workflow import TerminationEvent as TerminationEvent
    from rllm.workflows.workflow import Workflow as Workflow

__all__ = [
    "CumulativeWorkflow",
    "MultiTurnWorkflow",
    "SimpleWorkflow",
    "SingleTurnWorkflow",
    "TerminationEvent",
    "TerminationReason",
    "Workflow",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CumulativeWorkflow": "rllm.workflows.cumulative_workflow",
        "MultiTurnWorkflow": "rllm.workflows.multi_turn_workflow",
        "SimpleWorkflow": "rllm.workflows.simple_workflow",
        "SingleTurnWorkflow": "rllm.workflows.single_turn_workflow",
        "TerminationEvent": "rllm.workflows.workflow",
        "TerminationReason": "rllm.types",
        "Workflow": "rllm.workflows.workflow",
    },
)
