"""GiGPO: steps compared with the steps of siblings that had the same observation."""

from __future__ import annotations

from dataclasses import dataclass

from rllm.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class GiGPO(GRPO):
    """Group-in-group policy optimization (Feng et al. 2025, arXiv:2505.10978).

    The advantage of a step is its trajectory's advantage among the trajectories of the task, plus `step_coef` times the
    advantage of its discounted return among all steps of the task whose observation was the same. So a step that made
    progress where siblings got stuck is rewarded, even in a trajectory that failed. A step whose observation no other
    step had keeps the advantage of its trajectory.
    """

    step_coef: float = 1.0
    gamma: float = 0.95

    def __post_init__(self) -> None:
        self._require("step_coef", self.step_coef > 0, "use a number above 0, or algorithm.name=grpo")
        super().__post_init__()
