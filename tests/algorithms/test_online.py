from __future__ import annotations

from rllm.algorithms.reinforce import BASELINE_KEY, Online
from rllm.types import Trajectory, TrajectoryGroup


def group(*rewards: float, baseline: float | None = None) -> TrajectoryGroup:
    info = {} if baseline is None else {BASELINE_KEY: baseline}
    return TrajectoryGroup(trajectories=[Trajectory(reward=reward, info=dict(info)) for reward in rewards])


def test_group_is_compared_with_its_mean() -> None:
    assert Online().credit(group(1.0, 0.0, 0.5, baseline=9.0)) == [0.5, -0.5, 0.0]


def test_single_trajectory_is_compared_with_the_running_mean() -> None:
    assert Online().credit(group(1.0, baseline=0.25)) == [0.75]
    assert Online().baseline(group(1.0, baseline=0.25)) == 0.25
    assert Online().credit(group(1.0)) == [0.0]
