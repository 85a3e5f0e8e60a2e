"""Which trajectories are kept out of training, and whether a step has enough that teaches something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rllm.algorithms.base import Algorithm
from rllm.config.schema import FilterConfig
from rllm.trainer.roles import Roles
from rllm.trainer.shares import ALONE, ZERO_VARIANCE, Sample, is_reference, sampled_steps, shares_of
from rllm.types import NOT_TEXT_KEY, Episode, Trajectory

LEFT_OUT = "left_out"
"""Where a trajectory's `info` says why it is kept out."""
TRUNCATED = "truncated"
NOT_TEXT = "not_text"


def leave_out(episodes: Sequence[Episode], filters: FilterConfig) -> None:
    """Note on trajectories why they are not trained on; they are counted by this reason, and do not weigh in any mean."""
    for episode in episodes:
        ended = episode.termination_reason.value if episode.termination_reason else None
        for trajectory in episode.trajectories:
            if any(NOT_TEXT_KEY in step.info for step in trajectory.steps):  # the trainer sees tokens, and no images
                trajectory.info[LEFT_OUT] = NOT_TEXT
            elif ended in filters.ended_by:
                trajectory.info[LEFT_OUT] = ended
            elif filters.truncated and any(step.finish_reason == "length" for step in trajectory.steps):
                trajectory.info[LEFT_OUT] = TRUNCATED


def leave_out_uniform(episodes: Sequence[Episode], algorithm: Algorithm) -> None:
    """Likewise those of one training step whose group earned the same throughout, or has nobody else; where steps are compared,
    those of which that is so of every step."""
    groups = _groups(episodes, algorithm).values()
    teaching = {id(member) for group in groups if group.differs for member in group.members}
    for group in groups:
        for trajectory in group.members:
            if id(trajectory) not in teaching:
                trajectory.info.setdefault(LEFT_OUT, ZERO_VARIANCE if group.num_compared > 1 else ALONE)


def num_informative(episodes: Sequence[Episode], algorithm: Algorithm, roles: Roles | None = None) -> int:
    """How many tasks have a role that learns and whose rewards differ."""
    frozen = {name for name, role in (roles or {}).items() if not role.trainable}
    teaching = {
        task
        for (task, name, _), group in _groups(episodes, algorithm).items()
        if name not in frozen
        and group.members
        and group.differs
        and (group.has_reference or not algorithm.needs_greedy)
    }
    return len(teaching)


@dataclass
class _Group:
    """Trajectories that are compared with each other, or a step of each."""

    members: list[Trajectory] = field(default_factory=list)
    """Those that may be trained on."""
    rewards: set[float | None] = field(default_factory=set)
    """The different ones, that of the greedy rollout among them where it counts."""
    num_compared: int = 0
    """How many have these rewards."""
    has_reference: bool = False
    """Whether the greedy rollout is among them."""

    @property
    def differs(self) -> bool:
        return len(self.rewards) > 1


_Key: TypeAlias = tuple[str, str, int]
"""Task and name of trajectories, and which of their steps."""


def _groups(episodes: Sequence[Episode], algorithm: Algorithm) -> dict[_Key, _Group]:
    """What is scored, by what it is compared with."""
    groups: dict[_Key, _Group] = {}
    for episode in episodes:
        for index, trajectory in enumerate(episode.trajectories):
            if trajectory.final_reward() is None or episode.failed:
                continue
            has_tokens = bool(sampled_steps(trajectory))
            may_learn = trajectory.trainable and has_tokens and LEFT_OUT not in trajectory.info
            is_greedy = algorithm.needs_greedy and is_reference(trajectory)
            shares = shares_of(Sample(episode=episode, index=index), algorithm.level, algorithm.gamma)
            for place, share in enumerate(shares if may_learn or is_greedy else ()):
                group = groups.setdefault((episode.task_id, trajectory.name, place), _Group())
                group.members += [trajectory] if may_learn else []
                group.rewards.add(share.trajectory.final_reward())
                group.num_compared += 1
                group.has_reference = group.has_reference or is_greedy
    return groups
