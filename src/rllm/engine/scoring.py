"""Rewards that are known only after rollouts: rewards of whole groups, and weighted sums of named parts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rllm.config.schema import RewardSettings
from rllm.engine.failures import error_record
from rllm.engine.request import RolloutRequest
from rllm.errors import RewardError
from rllm.registry import did_you_mean
from rllm.rewards.scoring import AnyReward, give_reward, score_group, scores_groups, weighted_sum, weights_of
from rllm.types import Episode, TerminationReason, Trajectory, grouped, is_scored

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Scoring:
    """Completion of the rewards of rollouts after they have ended."""

    group_reward: AnyReward | None = None
    """Scores all rollouts of a task at once; see `rllm.rewards.scoring.group_reward`."""
    timeout_s: float = 600.0
    """Seconds that one call of it may take."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factors for named parts of rewards; empty leaves rewards as they are."""
    _known_parts: set[str] | None = field(default=None, init=False)
    """Names of the parts of the first rewards; `None` before them."""
    _has_warned: bool = field(default=False, init=False)

    @classmethod
    def of(cls, reward: object, settings: RewardSettings, *, timeout_s: float) -> Self:
        """Return the scoring of a run or an evaluation; `timeout_s` is used if the settings have no deadline."""
        return cls(
            group_reward=reward if callable(reward) and scores_groups(reward) else None,
            timeout_s=settings.timeout_s or timeout_s,
            weights=settings.weights or dict(weights_of(reward)),
        )

    async def complete(self, episodes: Sequence[Episode]) -> None:
        """Score the rollouts of one task, each role on its own, and weigh the parts of their rewards.

        If the reward function fails, so do these rollouts, and no others.
        """
        scored = [episode for episode in episodes if not episode.failed]
        if self.group_reward is not None:
            for members in _by_role(scored).values():
                await self._score(self.group_reward, members)
        for path in (path for episode in scored for path in episode.trajectories):
            if path.final_reward() is None:
                continue
            if not self._has_warned:
                self._known_parts = {*(self._known_parts or ()), *path.reward_parts}
            if self.weights and path.reward_parts:
                # In an environment the parts come from the last step.
                total = weighted_sum(path.reward_parts, self.weights)
                rewarded = [step for step in path.steps if is_scored(step.reward)]
                if rewarded:
                    rewarded[-1].reward = total
                path.reward = sum(step.reward or 0.0 for step in rewarded) if rewarded else total

    def warn_of_unknown_parts(self) -> None:
        """Warn of weights of parts that no reward has had; called when the first rollouts have ended."""
        known = self._known_parts
        if known is None or self._has_warned:
            return
        self._has_warned = True
        for name in sorted(self.weights.keys() - known):
            names = did_you_mean(name, known) or f"the parts are: {', '.join(sorted(known)) or 'none'}"
            logger.warning("reward.weights.%s has had no effect: no reward has a part of this name; %s", name, names)

    async def _score(self, reward: AnyReward, members: Sequence[tuple[Episode, Trajectory]]) -> None:
        paths, task = [path for _, path in members], members[0][0].task
        try:
            verdicts = await score_group(reward, task, paths, timeout_s=self.timeout_s)
        except RewardError as error:
            for episode, _ in members:
                episode.info["error"] = error_record(error)
                episode.is_correct, episode.termination_reason = False, TerminationReason.ERROR
            return
        for (episode, path), verdict in zip(members, verdicts, strict=True):
            give_reward(episode, path, verdict, reward)


class PendingGroups:
    """Rollouts that have ended while others of their task have not."""

    def __init__(self, attempts: Iterable[RolloutRequest], scoring: Scoring) -> None:
        self._scoring = scoring
        self._num_missing = Counter(attempt.task_id for attempt in attempts)
        self._ended: dict[str, list[Episode]] = {}

    async def add(self, episode: Episode) -> list[Episode]:
        """Return the episodes that now have their rewards: this one, or its whole group once that has ended."""
        if self._scoring.group_reward is None:
            await self._scoring.complete([episode])
            return [episode]
        task_id = episode.task_id
        self._ended.setdefault(task_id, []).append(episode)
        self._num_missing[task_id] -= 1
        if self._num_missing[task_id]:
            return []
        group = sorted(self._ended.pop(task_id), key=lambda item: item.index)
        await self._scoring.complete(group)
        return group


def _by_role(episodes: Sequence[Episode]) -> dict[str, list[tuple[Episode, Trajectory]]]:
    """Return the trajectories of each role that could be learned from, with their episodes."""

    def learnable(episode: Episode) -> Iterator[Trajectory]:
        learns = any(path.trainable for path in episode.trajectories)  # in an evaluation none does
        return (path for path in episode.trajectories if path.trainable or not learns)

    return grouped((path.name, (episode, path)) for episode in episodes for path in learnable(episode))
