"""Rollouts and calls that nothing is learned from: reasons of failed rollouts and of their calls, and side calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rllm.capture.side_calls import side_calls
from rllm.store.base import TraceStore
from rllm.types import NUM_SIDE_CALLS_KEY, Episode, StepCredit, TerminationReason, text_of

logger = logging.getLogger(__name__)


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


def name_side_call(episodes: Sequence[Episode], store: TraceStore) -> bool:
    """Log an example of the side calls of these episodes; return whether there is one."""
    for episode in episodes:
        if not episode.failed and any(path.info.get(NUM_SIDE_CALLS_KEY) for path in episode.trajectories):
            traces = store.by_session(episode.session_id)
            for trace_id, reason in side_calls(traces).items():
                trace = next(trace for trace in traces if trace.id == trace_id)
                logger.warning(
                    "side calls are not trained on (dropped/side_call counts them): their answers come back in no "
                    "later message. The first: session %s, %s, asked %s, answered %s. If they are part of the task: "
                    "rollout.side_calls=true",
                    episode.session_id,
                    reason,
                    _beginning(" ".join(map(text_of, trace.messages))),
                    _beginning(text_of(trace.response)),
                )
                return True
    return False


def _beginning(text: str) -> str:
    return repr(" ".join(text[:1000].split())[:80])


def _paths_by_call(episode: Episode) -> dict[str, dict[int, str]]:
    """By the id of a call the trajectories that it was made for, as far as the rollout had come to say so: which ones of the
    episode's, with their names."""
    found: dict[str, dict[int, str]] = {}
    for index, path in enumerate(episode.trajectories):
        for step in path.steps:
            found.setdefault(step.id, {})[index] = path.name
    return found
