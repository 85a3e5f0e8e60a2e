"""What a run makes known of its episodes, and which of them it can use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rllm.compat.metric_names import known_eval_metrics, known_training_metrics
from rllm.trainer.metrics.measure import episode_metrics, eval_metrics, why_unusable
from rllm.types import Episode

_VERDICT = re.compile(r"accuracy$|/solve_|/pass@")
"""Metrics that count what nobody judged as wrong."""


class Judge(Protocol):
    """How the episodes of a run are looked at; demonstrations tell other things than rollouts."""

    def why_unusable(self, episode: Episode) -> str | None:
        """Why nothing can be learned from the episode; `None` if something can."""
        ...

    def of_training(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """The metrics of what a training step was made of."""
        ...

    def of_evaluation(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """The metrics of held-out episodes, `eval/...` among them. May take its time: it is called from a thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutJudge:
    """Looks at rewards."""

    needs_rewards: bool = True
    """Whether an episode that nobody scored is of no use."""

    def why_unusable(self, episode: Episode) -> str | None:
        if not self.needs_rewards and not episode.failed:
            return None
        return why_unusable(episode)

    def of_training(self, episodes: Sequence[Episode]) -> dict[str, float]:
        return self._told({**episode_metrics(episodes), **known_training_metrics(episodes)}, episodes)

    def of_evaluation(self, episodes: Sequence[Episode]) -> dict[str, float]:
        return self._told({**eval_metrics(episodes), **known_eval_metrics(episodes)}, episodes)

    def _told(self, metrics: dict[str, float], episodes: Sequence[Episode]) -> dict[str, float]:
        """Without verdicts, where nobody gave one."""
        if any(why_unusable(episode) is None for episode in episodes):
            return metrics
        return {name: value for name, value in metrics.items() if not _VERDICT.search(name)}
