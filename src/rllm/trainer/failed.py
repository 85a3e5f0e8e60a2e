"""Rollouts that failed: under which reason they are counted, and the same reason beside every call that they made."""

from __future__ import annotations

from collections.abc import Sequence

from rllm.store.base import TraceStore
from rllm.types import Episode, StepCredit, TerminationReason


def reason_of(episode: Episode) -> str:
    """How a failed episode ended, such as `timeout`; `error` if its code, or a server, raised."""
    return (episode.termination_reason or TerminationReason.ERROR).value


def credits_of_failed(episodes: Sequence[Episode], store: TraceStore, *, step: int) -> list[StepCredit]:
    """One credit for each call of the failed episodes in each of its trajectories, with the reason why nobody learned from it
    in this training step."""
    return [
        StepCredit(
            trace_id=trace.id,
            session_id=episode.session_id,
            training_step=step,
            episode_id=episode.id,
            trajectory_name=name,
            trajectory_index=index,
            reward=None,
            dropped=reason_of(episode),
        )
        for episode in episodes
        if episode.failed
        for paths in [_paths_by_call(episode)]
        for trace in store.by_session(episode.session_id)
        for index, name in paths.get(trace.id, {0: ""}).items()
    ]


def _paths_by_call(episode: Episode) -> dict[str, dict[int, str]]:
    """By the id of a call the trajectories that it was made for, as far as the rollout had come to say so: which ones of the
    episode's, with their names."""
    found: dict[str, dict[int, str]] = {}
    for index, path in enumerate(episode.trajectories):
        for step in path.steps:
            found.setdefault(step.id, {})[index] = path.name
    return found
