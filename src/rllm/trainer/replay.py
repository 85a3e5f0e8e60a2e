"""Replay: groups of recent steps that are trained on again, beside those of new rollouts.

Their tokens are of older weights, which `algorithm.correction` corrects for, as with rollouts that run ahead. Which
groups are taken is a pure function of the seed, the step, and the groups that earlier steps have learned from.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence

from rllm.config.schema import TrainConfig
from rllm.config.sizes import num_replayed
from rllm.store.base import TraceStore
from rllm.trainer.credit import ALONE, DROPPED_KEY, ZERO_VARIANCE
from rllm.trainer.episode_records import episode_of, filled
from rllm.types import Episode, StepCredit

logger = logging.getLogger(__name__)


class ReplayBuffer:
    """Groups of the last `data.replay_steps` steps."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._groups: dict[int, list[list[Episode]]] = {}
        """Episodes of each group, by training step; none if nothing is replayed."""

    @property
    def sessions(self) -> dict[str, list[list[str]]]:
        """Sessions of the groups, by training step; as JSON for a checkpoint."""
        return {
            str(step): [[episode.session_id for episode in group] for group in groups]
            for step, groups in self._groups.items()
        }

    def restore(self, sessions: Mapping[str, Sequence[Sequence[str]]], store: TraceStore) -> None:
        """Read the groups of a checkpoint from the store. Groups that are not complete there are skipped and logged."""
        for step, groups in sessions.items():
            found = [[store.session(session_id) for session_id in group] for group in groups]
            complete = [[session for session in group if session is not None] for group in found if all(group)]
            self._groups[int(step)] = [[filled(episode_of(item, {}), store) for item in group] for group in complete]
            if len(complete) < len(groups):
                logger.warning(
                    "%d of the %d groups of step %s are no longer in the store, so they are not replayed",
                    len(groups) - len(complete),
                    len(groups),
                    int(step) + 1,
                )

    def sample(self, step: int) -> list[Episode]:
        """Return the episodes of the groups to train on again in a step; fewer groups than asked for if few exist."""
        groups = [group for number in sorted(self._groups) for group in self._groups[number]]
        count = min(num_replayed(self._config), len(groups))
        chosen = random.Random(f"{self._config.seed}:{step}:replay").sample(groups, count)
        return [episode for group in chosen for episode in group]

    def add(self, step: int, episodes: Iterable[Episode], credits: Iterable[StepCredit]) -> None:
        """Keep the groups that a step has learned from, and forget those that are too old for the next one."""
        if not num_replayed(self._config):
            return
        learned = {credit.session_id for credit in credits if credit.dropped is None}
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            if _is_usable(episode):
                groups.setdefault(episode.task_id, []).append(episode)
        self._groups[step] = [
            group for group in groups.values() if any(episode.session_id in learned for episode in group)
        ]
        for old in [number for number in self._groups if number <= step - self._config.data.replay_steps]:
            del self._groups[old]


def _is_usable(episode: Episode) -> bool:
    """Return whether an episode ended well and no filter dropped a part of it."""
    dropped = {path.info.get(DROPPED_KEY) for path in episode.trajectories}
    return not episode.failed and dropped <= {None, ZERO_VARIANCE, ALONE}
