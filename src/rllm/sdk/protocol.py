"""The names that users of the rLLM framework know for trajectories and steps."""

from rllm.types import Step as StepView
from rllm.types import Trajectory as TrajectoryView

__all__ = ["StepView", "TrajectoryView"]
