"""Selection of training data: filters of trajectories and groups, records of what was left out, and replay."""

from __future__ import annotations

import logging
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rllm.algorithms.base import Algorithm
from rllm.capture.side_calls import side_calls
from rllm.config.schema import FilterConfig, TrainConfig
from rllm.config.sizes import num_replayed
from rllm.store.base import TraceStore
from rllm.trainer.credit import (
    ALONE,
    DROPPED_KEY,
    ZERO_VARIANCE,
    Roles,
    Sample,
    failure_reason,
    is_reference,
    sampled_steps,
    units_of,
)
from rllm.trainer.episode_records import episode_of, filled
from rllm.types import NOT_TEXT_KEY, NUM_SIDE_CALLS_KEY, Episode, StepCredit, Trajectory, grouped, text_of

logger = logging.getLogger(__name__)

TRUNCATED = "truncated"
NOT_TEXT = "not_text"


def drop_filtered(episodes: Sequence[Episode], filters: FilterConfig) -> None:
    """Mark the trajectories that filters exclude with the reason; they are counted by it, and not part of any mean."""
    for episode in episodes:
        ended = episode.termination_reason.value if episode.termination_reason else None
        for trajectory in episode.trajectories:
            if any(NOT_TEXT_KEY in step.info for step in trajectory.steps):  # the trainer sees tokens, and no images
                trajectory.info[DROPPED_KEY] = NOT_TEXT
            elif ended in filters.ended_by:
                trajectory.info[DROPPED_KEY] = ended
            elif filters.truncated and any(step.finish_reason == "length" for step in trajectory.steps):
                trajectory.info[DROPPED_KEY] = TRUNCATED


def drop_uniform(episodes: Sequence[Episode], algorithm: Algorithm) -> None:
    """Mark the trajectories of one training step whose groups have equal rewards throughout, or no other member.

    If steps are compared, that holds for the groups of all steps of the trajectory.
    """
    groups = _groups(episodes, algorithm).values()
    informative = {id(member) for group in groups if group.differs for member in group.members}
    for group in groups:
        for trajectory in group.members:
            if id(trajectory) not in informative:
                trajectory.info.setdefault(DROPPED_KEY, ZERO_VARIANCE if group.num_compared > 1 else ALONE)


def num_informative(episodes: Sequence[Episode], algorithm: Algorithm, roles: Roles | None = None) -> int:
    """Return the number of tasks with a trained role whose rewards differ."""
    frozen = {name for name, role in (roles or {}).items() if not role.trainable}
    informative = {
        task
        for (task, name, _), group in _groups(episodes, algorithm).items()
        if name not in frozen
        and group.members
        and group.differs
        and (group.has_reference or not algorithm.needs_greedy)
    }
    return len(informative)


def warn_of_unknown_roles(roles: Roles, episodes: Sequence[Episode]) -> None:
    """Warn of roles without a trajectory, whose settings have no effect; names are known after the first rollouts."""
    names = {path.name for episode in episodes for path in episode.trajectories}
    for name in sorted(roles.keys() - names if names else ()):
        logger.warning(
            "roles.%s: no trajectory of the first step has this name, so its settings had no effect; the names are %s",
            name,
            ", ".join(sorted(names)),
        )


def credits_of_failed(episodes: Sequence[Episode], store: TraceStore, *, step: int) -> list[StepCredit]:
    """Return a record for each call of the failed episodes in each trajectory, with the reason of the failure."""
    records: list[StepCredit] = []
    for episode in (episode for episode in episodes if episode.failed):
        names: dict[str, dict[int, str]] = {}  # names of the trajectories that each call belongs to, by index
        for index, path in enumerate(episode.trajectories):
            for call in path.steps:
                names.setdefault(call.id, {})[index] = path.name
        records += [
            StepCredit(
                trace_id=trace.id,
                session_id=episode.session_id,
                training_step=step,
                episode_id=episode.id,
                trajectory_name=name,
                trajectory_index=index,
                reward=None,
                dropped=failure_reason(episode),
            )
            for trace in store.by_session(episode.session_id)
            for index, name in names.get(trace.id, {0: ""}).items()
        ]
    return records


def warn_of_side_call(episodes: Sequence[Episode], store: TraceStore) -> bool:
    """Log an example of the side calls of these episodes, and return whether there is one."""
    for episode in episodes:
        if not episode.failed and any(path.info.get(NUM_SIDE_CALLS_KEY) for path in episode.trajectories):
            traces = store.by_session(episode.session_id)
            for trace_id, reason in side_calls(traces).items():
                trace = next(trace for trace in traces if trace.id == trace_id)
                logger.warning(
                    "side calls are not trained on (dropped/side_call counts them): their answers are in no later "
                    "message. The first: session %s, %s, asked %s, answered %s. If they are part of the task: "
                    "rollout.side_calls=true",
                    episode.session_id,
                    reason,
                    _excerpt(" ".join(map(text_of, trace.messages))),
                    _excerpt(text_of(trace.response)),
                )
                return True
    return False


@dataclass
class _Group:
    """Trajectories that are compared with each other, or a step of each."""

    members: list[Trajectory] = field(default_factory=list)
    """Those that may be trained on."""
    rewards: set[Hashable] = field(default_factory=set)
    """Distinct rewards, including the greedy rollout's if it is compared with."""
    may_be_equal: bool = False
    """Equal rewards are informative, too."""
    num_compared: int = 0
    has_reference: bool = False

    @property
    def differs(self) -> bool:
        return self.may_be_equal or len(self.rewards) > 1


def _groups(episodes: Sequence[Episode], algorithm: Algorithm) -> dict[tuple[str, str, int], _Group]:
    """Return the groups by task, name of the trajectories, and place of the unit in them."""
    groups: dict[tuple[str, str, int], _Group] = {}
    for episode in episodes:
        for index, trajectory in enumerate(episode.trajectories):
            if trajectory.final_reward() is None or episode.failed:
                continue
            may_learn = trajectory.trainable and sampled_steps(trajectory) and DROPPED_KEY not in trajectory.info
            is_greedy = algorithm.needs_greedy and is_reference(trajectory)
            units = units_of(Sample(episode=episode, index=index), algorithm.level, algorithm.gamma)
            for place, unit in enumerate(units if may_learn or is_greedy else ()):
                group = groups.setdefault(
                    (episode.task_id, trajectory.name, place), _Group(may_be_equal=not algorithm.compares_rollouts)
                )
                group.members += [trajectory] if may_learn else []
                group.rewards.add(algorithm.compared(unit.trajectory))
                group.num_compared += 1
                group.has_reference = group.has_reference or is_greedy
    return groups


def _excerpt(text: str) -> str:
    return repr(" ".join(text[:1000].split())[:80])


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
        # Rollouts that ended well, and of which no filter dropped a part.
        groups = grouped(
            (episode.task_id, episode)
            for episode in episodes
            if not episode.failed
            and {path.info.get(DROPPED_KEY) for path in episode.trajectories} <= {None, ZERO_VARIANCE, ALONE}
        )
        self._groups[step] = [
            group for group in groups.values() if any(episode.session_id in learned for episode in group)
        ]
        for old in [number for number in self._groups if number <= step - self._config.data.replay_steps]:
            del self._groups[old]
