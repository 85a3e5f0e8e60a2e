"""Prompts and rewards of the two roles: the proposer is rewarded for its last proposal, the checker for its verdicts."""

import re
from collections.abc import Sequence
from statistics import fmean

from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.types import Task

PROPOSE = "Think, then propose an expression in <answer></answer>."
CHECK = "Think, then say YES if the last proposal is right, else NO."
AGREED = "YES"


def is_right(proposal: str, task: Task) -> bool:
    """Return whether the last answer in a proposal solves the task."""
    answer = "".join(re.findall(r"<answer>[^<]*</answer>", proposal)[-1:])
    return bool(countdown_reward_fn(task, answer).reward == 1.0)


def proposer_reward(proposals: Sequence[str], task: Task) -> float:
    """Return 1.0 if the team's final answer is right."""
    return float(is_right(proposals[-1], task))


def checker_reward(proposals: Sequence[str], verdicts: Sequence[str], task: Task) -> float:
    """Return the share of verdicts that are right; each is about the proposal before it."""
    judged = zip(proposals, verdicts, strict=True)
    return fmean((AGREED in verdict) == is_right(proposal, task) for proposal, verdict in judged)
