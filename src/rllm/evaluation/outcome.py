"""One rollout as an evaluation sees it: right or wrong, its reward, its cost, or why it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rllm.engine.failures import why_failed, why_unscored
from rllm.types import Episode

PROMPT_TOKENS, SAMPLED_TOKENS = "rollout/prompt_tokens", "rollout/sampled_tokens"
NUM_CALLS, SECONDS = "rollout/num_calls", "timing/rollout_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What is kept of an episode in memory; the episode itself is in the log."""

    task_id: str
    index: int
    is_correct: bool = False
    failure: str | None = None
    """Why the rollout failed; a failed one counts as wrong."""
    unscored: str | None = None
    """Why nobody judged the rollout; such a one counts as neither right nor wrong."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Role to mean reward of its scored trajectories."""
    prompt_tokens: float | None = None
    """Of all calls together; `None` where the server gave no token ids, or the rollout failed."""
    sampled_tokens: float | None = None
    num_calls: float | None = None
    seconds: float | None = None
    """Wall-clock time of the rollout."""

    @classmethod
    def of(cls, episode: Episode) -> Self:
        """The outcome of an episode that went through `with_costs`, now or before it was logged."""
        failure = why_failed(episode)
        return cls(
            task_id=episode.task_id,
            index=episode.index,
            is_correct=bool(episode.is_correct) and failure is None,
            failure=failure,
            unscored=why_unscored(episode),
            rewards={} if failure else _rewards_by_role(episode),
            prompt_tokens=episode.metrics.get(PROMPT_TOKENS),
            sampled_tokens=episode.metrics.get(SAMPLED_TOKENS),
            num_calls=episode.metrics.get(NUM_CALLS),
            seconds=episode.metrics.get(SECONDS),
        )


def with_costs(episode: Episode) -> Episode:
    """The same episode with its tokens counted in its metrics, since the log leaves token ids out."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    if steps and all(step.prompt_ids and step.response_ids for step in steps):
        episode.metrics[PROMPT_TOKENS] = float(sum(len(step.prompt_ids) for step in steps))
        episode.metrics[SAMPLED_TOKENS] = float(sum(len(step.response_ids) for step in steps))
    return episode


def _rewards_by_role(episode: Episode) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for trajectory in episode.trajectories:
        if (reward := trajectory.final_reward()) is not None:
            rewards.setdefault(trajectory.name, []).append(reward)
    return {name: sum(values) / len(values) for name, values in rewards.items()}
