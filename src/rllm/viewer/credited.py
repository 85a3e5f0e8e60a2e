"""What the trainer made of a call, told as one where several trajectories share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rllm.types import StepCredit, credits_by_trace


def credit_of_calls(credits_: Iterable[StepCredit]) -> dict[str, StepCredit]:
    """What each call was trained with, in all its trajectories together: its advantages add up, as its gradients do."""
    return {trace_id: _together(members) for trace_id, members in credits_by_trace(credits_).items()}


def _together(members: Sequence[StepCredit]) -> StepCredit:
    latest = [credit for credit in members if credit.training_step == members[-1].training_step]
    learned = [credit for credit in latest if credit.dropped is None]
    if len(learned) < 2:
        return [*learned, *latest][0]
    advantages = [credit.advantage for credit in learned if credit.advantage is not None]
    return replace(
        learned[0],
        trajectory_name=" + ".join(dict.fromkeys(credit.trajectory_name for credit in learned)),
        reward=None,
        group_id=None,
        baseline=None,
        advantage=sum(advantages) if advantages else None,
    )
