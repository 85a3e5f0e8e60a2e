"""On-policy distillation (Agarwal et al. 2024; Lu et al. 2025): a teacher scores every token of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class Distill(Algorithm):
    """Distillation: the advantage of a token is its log-probability under the teacher less the policy's.

    Rewards are ignored. The loss has the gradient of the reverse divergence KL(policy || teacher), token by token. To
    learn from rewards as well, give another algorithm a `teacher_coef`:
    `algorithm.name=grpo algorithm.teacher_coef=0.1`.
    """

    needs_rewards: ClassVar[bool] = False

    teacher_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("teacher_coef", self.teacher_coef > 0, "use a number above 0, such as 1")
        self._refuse("distill ignores rewards; leave it out", "level", "gamma", "kl_in")

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return [0.0] * len(group.trajectories)
