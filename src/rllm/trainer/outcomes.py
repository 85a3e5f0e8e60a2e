"""How rollouts ended, kept beside their traces: what `rllm view` lists, sorts and filters by without reading any trace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from rllm.engine.join import DEFAULT_NAME
from rllm.rewards.scoring import is_number
from rllm.store.base import TraceStore
from rllm.types import DRIFT_KEY, OUTCOME_KEY, Episode, Step, StepCredit, Trajectory, is_scored

Credited = tuple[str, int, str]
"""Ids of a session and a trace, and between them which trajectory it is: several may share a call."""

_MAX_TEXT = 4000
"""Characters of an error or a traceback that are kept, its end: there it says what happened."""


async def keep_outcomes(store: TraceStore, episodes: Sequence[Episode], credits: Iterable[StepCredit] = ()) -> None:
    """Note on the session of each episode how it ended; durable on return. What has no session in the store is passed over."""
    credit_of = {(credit.session_id, credit.trajectory_index, credit.trace_id): credit for credit in credits}
    await asyncio.to_thread(_keep, store, episodes, credit_of)


def _keep(store: TraceStore, episodes: Sequence[Episode], credit_of: Mapping[Credited, StepCredit]) -> None:
    known = [episode for episode in episodes if store.session(episode.session_id) is not None]
    for write in [note_outcome(store, episode, credit_of) for episode in known]:
        write.result()


def note_outcome(
    store: TraceStore, episode: Episode, credit_of: Mapping[Credited, StepCredit] = MappingProxyType({})
) -> Future[None]:
    """Begin to note on its session, which the store has or is being given, how an episode ended; see `outcome_of`."""
    return store.open_session(episode.session_id, {OUTCOME_KEY: outcome_of(episode, credit_of)})


def outcome_of(episode: Episode, credit_of: Mapping[Credited, StepCredit]) -> dict[str, Any]:
    """The facts of an episode that are small, as JSON holds them.

    Args:
        episode: as its rollout, and its training if there was one, left it.
        credit_of: by session, trajectory and trace, what the trainer decided about its steps.
    """
    error = episode.info.get("error")
    return {
        "ended": episode.termination_reason.value if episode.termination_reason else None,
        "is_correct": episode.is_correct,
        "error": None if error is None else {name: str(text)[-_MAX_TEXT:] for name, text in error.items()},
        "warnings": [str(warning) for warning in episode.info.get("warnings", ())],
        "metrics": dict(episode.metrics),
        "trajectories": [_trajectory(index, episode, credit_of) for index in range(len(episode.trajectories))],
    }


def _trajectory(index: int, episode: Episode, credit_of: Mapping[Credited, StepCredit]) -> dict[str, Any]:
    path = episode.trajectories[index]
    decided = [credit_of.get((episode.session_id, index, step.id)) for step in path.steps]
    known = [credit for credit in decided if credit is not None]
    reasons = {credit.dropped for credit in known}
    scored: list[Trajectory | Step] = [path, *path.steps]
    return {
        "name": path.name or DEFAULT_NAME,
        "reward": path.final_reward() if all(map(_is_finite, scored)) else None,
        "trainable": path.trainable,
        "advantage": next((credit.advantage for credit in known if credit.advantage is not None), None),
        "dropped": next((credit.dropped for credit in known if credit.dropped), None) if None not in reasons else None,
        "num_tokens": sum(len(step.response_ids) for step in path.steps),
        "truncated": any(step.finish_reason == "length" for step in path.steps),
        "tools": sorted({name for step in path.steps for name in _tools_of(step)}),
        "steps": [_step(step, credit) for step, credit in zip(path.steps, decided, strict=True)],
    }


def _step(step: Step, credit: StepCredit | None) -> dict[str, Any]:
    """What is said of a step only where it is: its own reward, what it was credited with, why its prompt drifted."""
    told: dict[str, Any] = {"id": step.id}
    if is_scored(step.reward) and _is_finite(step):
        told["reward"] = step.reward
    if credit is not None and credit.advantage is not None:
        told["advantage"] = credit.advantage
    if DRIFT_KEY in step.info:
        told["drift"] = step.info[DRIFT_KEY]
    return told


def _is_finite(item: Trajectory | Step) -> bool:
    """Whether its reward, if it has one, is a number; where it is not, the rollout has failed for that reason."""
    reward: Any = item.reward
    return not is_scored(reward) or (is_number(reward) and math.isfinite(reward))


def _tools_of(step: Step) -> list[str]:
    """The tools that the answer calls."""
    answer = step.chat_completions[-1] if step.chat_completions else {}
    calls = [call for call in answer.get("tool_calls") or () if isinstance(call, Mapping)]
    return [str((call.get("function") or {}).get("name")) for call in calls]
