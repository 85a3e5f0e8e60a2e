"""The names that users of the rLLM framework know for traces, trajectories and steps."""

from rllm.gone import gone_names
from rllm.types import Step as StepView
from rllm.types import Trace
from rllm.types import Trajectory as TrajectoryView

__all__ = ["StepView", "Trace", "TrajectoryView", "trace_to_step_view"]

trace_to_step_view = StepView.from_trace

__getattr__ = gone_names(__name__)
