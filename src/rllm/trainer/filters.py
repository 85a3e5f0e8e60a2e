"""Which trajectories are kept out of training, and whether a step has enough that teaches something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rllm.trainer.config.schema import FilterConfig
from rllm.trainer.roles import Roles
from rllm.trainer.shares import ALONE, ZERO_VARIANCE
from rllm.types import Episode, Trajectory

LEFT_OUT = "left_out"
"""Where a trajectory's `info` says why it is kept out."""
TRUNCATED = "truncated"


def leave_out(
    episodes: Sequence[Episode], filters: FilterConfig, *, uniform: bool = False, with_greedy: bool = False
) -> None:
    """Note on trajectories why they are not trained on; they are counted by this reason, and do not weigh in any mean.

    Args:
        episodes: of one training step.
        filters: the run's.
        uniform: also those whose group earned the same throughout, or has nobody else.
        with_greedy: whether a group is compared with the task's greedy rollout, which is not trained on.
    """
    for episode in episodes:
        ended = episode.termination_reason.value if episode.termination_reason else None
        for trajectory in episode.trajectories:
            if ended in filters.ended_by:
                trajectory.info[LEFT_OUT] = ended
            elif filters.truncated and any(step.finish_reason == "length" for step in trajectory.steps):
                trajectory.info[LEFT_OUT] = TRUNCATED
    if uniform:
        for group in _by_role(episodes, with_greedy).values():
            if len(group.rewards) == 1:
                for trajectory in group.members:
                    trajectory.info[LEFT_OUT] = ZERO_VARIANCE if group.num_compared > 1 else ALONE


def num_informative(episodes: Sequence[Episode], roles: Roles | None = None, *, with_greedy: bool = False) -> int:
    """How many tasks have a role that learns and whose rewards differ; `with_greedy` as for `leave_out`."""
    frozen = {name for name, role in (roles or {}).items() if not role.trainable}
    groups = _by_role(episodes, with_greedy).items()
    return len(
        {task for (task, name), group in groups if name not in frozen and group.members and len(group.rewards) > 1}
    )


@dataclass
class _Group:
    """Trajectories that are compared with each other."""

    members: list[Trajectory] = field(default_factory=list)
    """Those that may be trained on."""
    rewards: set[float] = field(default_factory=set)
    """The different ones, that of the greedy rollout among them where it counts."""
    num_compared: int = 0
    """Trajectories that have these rewards."""


def _by_role(episodes: Sequence[Episode], with_greedy: bool) -> dict[tuple[str, str], _Group]:
    """Scored trajectories by task and name."""
    groups: dict[tuple[str, str], _Group] = {}
    for episode in episodes:
        for trajectory in episode.trajectories:
            reward = trajectory.final_reward()
            if reward is None or episode.failed:
                continue
            group = groups.setdefault((episode.task_id, trajectory.name), _Group())
            may_learn = trajectory.trainable and LEFT_OUT not in trajectory.info
            if may_learn:
                group.members.append(trajectory)
            if may_learn or (with_greedy and not trajectory.trainable):
                group.rewards.add(reward)
                group.num_compared += 1
    return groups
