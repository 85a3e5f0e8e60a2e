"""Self-distillation: the policy that has seen a demonstration teaches the policy that has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rllm.algorithms.distill import Distill


@dataclass(frozen=True, kw_only=True)
class SDFT(Distill):
    """Self-distillation fine-tuning (Shenfeld et al. 2026, arXiv:2601.19897): on-policy learning from demonstrations.

    The policy answers a task, and the same model scores the answer with a demonstration of the task before the prompt.
    As in `distill`, the advantage of a token is how much likelier that makes it, so the loss has the gradient
    of KL(policy || policy after a demonstration), token by token. Rewards are ignored.
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
