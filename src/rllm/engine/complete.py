"""The last act of every rollout: say whose episode it is, and give its trajectories the tokens of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rllm.engine.join import join
from rllm.engine.runner import Attempt
from rllm.parser.chat_template import lost_warning
from rllm.types import LOST_KEY, REFERENCE_KEY, Episode, Step, Trace, Trajectory

DEFAULT_NAME = "agent"


def complete(episode: Episode, attempt: Attempt, traces: Sequence[Trace], *, seen: Sequence[Trace] = ()) -> Episode:
    """The same episode, identified and joined with its attempt's traces, which are in call order; `seen` as for `join`.

    Raises:
        AgentError: if it cannot be told whose calls these are.
        CaptureError: if a trainable trajectory has no usable tokens, or names a call that was not captured.
    """
    _identify(episode, attempt)
    _drop_repeated(episode)
    join(
        episode,
        traces,
        seen=seen,
        tokens_required=attempt.tokens_required,
        take_side_calls=attempt.side_calls,
    )
    _warn_of_equal_names(episode)
    _warn_of_lost(episode, traces)
    episode.metrics.setdefault("rollout/num_calls", float(len(traces)))
    return episode


def _warn_of_lost(episode: Episode, traces: Sequence[Trace]) -> None:
    """Note what the agent sent and the model did not read, because the chat template prints none of it."""
    lost = sorted({kind for trace in traces for kind in trace.metadata.get(LOST_KEY) or ()})
    if lost:
        episode.info[LOST_KEY] = lost
    for kind in lost:
        warn(episode, lost_warning(kind))


def warn(episode: Episode, warning: str) -> None:
    """Note on the episode what is wrong and was borne with."""
    warnings = episode.info.setdefault("warnings", [])
    if warning not in warnings:
        warnings.append(warning)


def _identify(episode: Episode, attempt: Attempt) -> None:
    episode.task, episode.task_id, episode.index = attempt.task, attempt.task_id, attempt.index
    episode.id = f"{attempt.task_id}:{attempt.index}"
    episode.session_id = attempt.session_id
    for trajectory in episode.trajectories:
        trajectory.task = attempt.task if trajectory.task is None else trajectory.task
        if trajectory.trainable and not attempt.trainable:
            trajectory.trainable = False
            if attempt.split == "train":
                trajectory.info[REFERENCE_KEY] = True
    unscored = [trajectory.name for trajectory in episode.trajectories if trajectory.final_reward() is None]
    if unscored:
        remedy = "return a number, give the trajectory a reward, or name the function that judges it (--reward)"
        episode.info.setdefault("unscored", f"no reward was returned for {', '.join(map(repr, unscored))}: {remedy}")


def _drop_repeated(episode: Episode) -> None:
    """What was given twice counts once: the same trajectory of an episode, the same step of a trajectory."""
    paths: dict[Any, Trajectory] = {}
    for path in episode.trajectories:
        steps: dict[str, Step] = {}
        for step in path.steps:
            steps.setdefault(step.id, step)
        if len(steps) < len(path.steps):
            warn(episode, f"trajectory {path.name!r} has the same step more than once; it counts once")
            path.steps = list(steps.values())
        paths.setdefault((path.uid, path.name, *steps), path)
    if len(paths) < len(episode.trajectories):
        warn(episode, "the same trajectory was given more than once; it counts once: make a Trajectory for each")
        episode.trajectories = list(paths.values())


def _warn_of_equal_names(episode: Episode) -> None:
    count = Counter(trajectory.name for trajectory in episode.trajectories)[DEFAULT_NAME]
    if count > 1:
        warn(
            episode,
            f"{count} trajectories are all named {DEFAULT_NAME!r}, so they are compared with each other as one role: give each "
            "role a name of its own, such as @trajectory(name='solver')",
        )
