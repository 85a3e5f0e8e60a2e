"""What sets one role apart from the others: whether it learns, how much it weighs, and what credits it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm.algorithms.base import Algorithm
from rllm.types import Episode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Role:
    """How trajectories of one name are trained."""

    trainable: bool = True
    weight: float = 1.0
    """What their advantages are multiplied with."""
    estimator: Algorithm | None = None
    """What credits them; `None` is the run's algorithm, which gives the loss in any case."""


PLAIN = Role()
Roles = Mapping[str, Role]
"""By name of the trajectories; those that are not named are plain."""


def warn_of_unknown(roles: Roles, episodes: Sequence[Episode]) -> None:
    """Tell of roles that no trajectory has: their settings do nothing, and nobody knows their names before the first rollouts."""
    names = {path.name for episode in episodes for path in episode.trajectories}
    for name in sorted(roles.keys() - names if names else ()):
        logger.warning(
            "roles.%s: no trajectory of the first step has this name, so its settings did nothing there; the names are %s",
            name,
            ", ".join(sorted(names)),
        )
