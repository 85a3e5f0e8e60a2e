"""Which trajectories are kept out of training, and whether a step has enough that teaches something."""

from __future__ import annotations

from collections.abc import Sequence

from rllm.trainer.config.schema import FilterConfig
from rllm.trainer.roles import Roles
from rllm.trainer.shares import ZERO_VARIANCE
from rllm.types import Episode, Trajectory

LEFT_OUT = "left_out"
"""Where a trajectory's `info` says why it is kept out."""
TRUNCATED = "truncated"


def leave_out(episodes: Sequence[Episode], filters: FilterConfig, *, uniform: bool = False) -> None:
    """Note on trajectories why they are not trained on; they are counted by this reason, and do not weigh in any mean.

    Args:
        episodes: of one training step.
        filters: the run's.
        uniform: also those whose group earned the same throughout.
    """
    for episode in episodes:
        ended = episode.termination_reason.value if episode.termination_reason else None
        for trajectory in episode.trajectories:
            if ended in filters.ended_by:
                trajectory.info[LEFT_OUT] = ended
            elif filters.truncated and any(step.finish_reason == "length" for step in trajectory.steps):
                trajectory.info[LEFT_OUT] = TRUNCATED
    if uniform:
        for members in _by_role(episodes).values():
            if not _differ(members):
                for trajectory in members:
                    trajectory.info[LEFT_OUT] = ZERO_VARIANCE


def num_informative(episodes: Sequence[Episode], roles: Roles | None = None) -> int:
    """How many tasks have a role that learns and whose rewards differ."""
    frozen = {name for name, role in (roles or {}).items() if not role.trainable}
    groups = _by_role(episodes).items()
    return len({task for (task, name), members in groups if name not in frozen and _differ(members)})


def _by_role(episodes: Sequence[Episode]) -> dict[tuple[str, str], list[Trajectory]]:
    """Scored, trainable trajectories by task and name."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for episode in episodes:
        for trajectory in episode.trajectories:
            usable = trajectory.trainable and LEFT_OUT not in trajectory.info and not episode.failed
            if usable and trajectory.final_reward() is not None:
                groups.setdefault((episode.task_id, trajectory.name), []).append(trajectory)
    return groups


def _differ(members: Sequence[Trajectory]) -> bool:
    return len({trajectory.final_reward() for trajectory in members}) > 1
