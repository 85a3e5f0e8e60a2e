"""On-policy distillation (Agarwal et al. 2024; Lu et al. 2025): the policy speaks, and a teacher judges every token.

The teacher is another model, or the policy itself that has seen a demonstration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class Distill(Algorithm):
    """Distillation: the advantage of a token is its log-probability under the teacher less the policy's.

    Rewards are ignored. The gradient is that of the reverse divergence KL(policy || teacher), token by token. To learn
    from rewards as well, give another algorithm a `teacher_coef`: `algorithm.name=grpo algorithm.teacher_coef=0.1`.
    """

    needs_rewards: ClassVar[bool] = False

    teacher_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("teacher_coef", self.teacher_coef > 0, "use a number above 0, such as 1")
        self._refuse("distill ignores rewards; leave it out", "level", "gamma", "kl_in")

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return [0.0] * len(group.trajectories)


@dataclass(frozen=True, kw_only=True)
class SDFT(Distill):
    """Self-distillation fine-tuning (Shenfeld et al. 2026, arXiv:2601.19897): on-policy learning from demonstrations.

    The policy answers a task, and the same model scores the answer with a demonstration of the task before the prompt.
    As in `distill`, the advantage of a token is how much likelier that makes it, so the gradient is that of
    KL(policy || policy after a demonstration), token by token. Rewards are ignored.
    """

    is_own_teacher: ClassVar[bool] = True

    demonstration: str = "demonstration"
    """Field of the task that has the demonstration, a text such as a good answer."""
    teacher_weights: Literal["initial", "current"] = "initial"
    """Weights of the teacher: those that the run began with, or those that are trained."""
    instruction: str = "Here is an example of a good answer to what follows:"
    """Text before the demonstration, in a user's message of its own before the conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("demonstration", bool(self.demonstration), "name the field of a task that has it")

    @property
    def needs_original(self) -> bool:
        return super().needs_original or self.teacher_weights == "initial"
