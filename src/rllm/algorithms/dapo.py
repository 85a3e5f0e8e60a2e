"""DAPO (Yu et al. 2025): GRPO with a higher clip, a mean over tokens, and a penalty before the length limit.

Its fourth part, resampling tasks whose rewards are all alike, is a setting of rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rllm.algorithms.grpo import GRPO
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO that clips less above than below, and takes up to 1 off the reward of what comes near the length limit."""

    clip_high: float = 0.28
    overlong_length: int | None = None
    """Tokens of a trajectory from which 1 is subtracted from its reward, such as rollout.max_tokens; None subtracts
    nothing."""
    overlong_buffer: int | None = None
    """Over how many tokens before that the penalty rises from 0, such as a fifth of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("clip_high", self.clip_high >= self.clip_low, "use at least clip_low; dapo clips less above")
        self._require(
            "overlong_buffer",
            (self.overlong_buffer is None) is (self.overlong_length is None),
            "set it together with overlong_length, or neither",
        )
        if self.overlong_length is not None and self.overlong_buffer is not None:
            self._require(
                "overlong_buffer",
                0 < self.overlong_buffer <= self.overlong_length,
                f"use a number of tokens from 1 to overlong_length={self.overlong_length}",
            )

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return super().credit(self._shaped(group))

    def baseline(self, group: TrajectoryGroup) -> float | None:
        return super().baseline(self._shaped(group))

    def _shaped(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with lengths penalised."""
        penalties = group.penalties or [0.0] * len(group.trajectories)
        overlong = [self.overlong_penalty(length) for length in group.lengths]
        return replace(group, penalties=[one + other for one, other in zip(penalties, overlong, strict=True)])

    def overlong_penalty(self, length: int) -> float:
        """Return the penalty, 0 to 1, of a trajectory that reaches into the buffer (eq. 13, negated)."""
        if self.overlong_length is None or self.overlong_buffer is None:
            return 0.0
        return min(max(1 - (self.overlong_length - length) / self.overlong_buffer, 0.0), 1.0)
