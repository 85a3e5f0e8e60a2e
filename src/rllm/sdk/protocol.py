"""The names that users of the rLLM framework know for traces, trajectories and steps."""

from rllm.types import Step as StepView
from rllm.types import Trace
from rllm.types import Trajectory as TrajectoryView

__all__ = ["StepView", "Trace", "TrajectoryView"]
