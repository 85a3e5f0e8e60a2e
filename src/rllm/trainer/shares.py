"""Who is credited: whole trajectories, or their steps, in the groups that are compared with each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import TokenSequence
from rllm.errors import ConfigError
from rllm.trainer.roles import PLAIN, Roles
from rllm.types import REFERENCE_KEY, Episode, Step, Trajectory, TrajectoryGroup, discounted, is_scored

# Why something is left out.
UNSCORED = "unscored"
FROZEN = "not_trainable"
NO_TOKENS = "no_tokens"
ALONE = "too_few_siblings"
NO_GREEDY = "no_greedy_rollout"
ZERO_VARIANCE = "zero_variance"
SIDE_CALL = "side_call"
UNUSABLE_CALL = "unusable_call"

NOT_COMPARED = (ALONE, NO_GREEDY)


@dataclass(kw_only=True)
class Sample:
    """One trajectory on its way into the batch."""

    episode: Episode
    index: int
    """Which of the episode's trajectories it is."""
    sequences: list[TokenSequence] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    dropped: str | None = None
    """Why it was left out before anything was credited."""

    @property
    def trajectory(self) -> Trajectory:
        return self.episode.trajectories[self.index]

    @property
    def role(self) -> str:
        """Which trajectories it is compared with: those of one task and one name."""
        return f"{self.episode.task_id}/{self.trajectory.name}"

    @property
    def reason(self) -> str | None:
        """Why none of it is learned from; `None` if some of it is."""
        if self.dropped or not self.shares:
            return self.dropped
        return self.shares[0].dropped if all(share.dropped for share in self.shares) else None


@dataclass(kw_only=True)
class Share:
    """What is credited as one: the steps of a trajectory together, or one of them."""

    trajectory: Trajectory
    """The sample's own, or one of a single step whose reward is what came from there on."""
    group_id: str
    penalty: float = 0.0
    """Taken off the reward."""
    baseline: float | None = None
    advantage: float | None = None
    """Where single tokens are credited, their mean."""
    by_step: dict[str, float] = field(default_factory=dict)
    """Where single tokens are credited, the mean of each step's, by its id."""
    dropped: str | None = None

    @property
    def steps(self) -> list[Step]:
        return self.trajectory.steps


def shares_of(sample: Sample, level: Literal["trajectory", "step"], gamma: float) -> list[Share]:
    """The shares of a scored sample, in the order of its steps; at level step, of the steps that sampled something."""
    if level == "trajectory":
        return [Share(trajectory=sample.trajectory, group_id=sample.role)]
    steps = sampled_steps(sample.trajectory)
    returns = discounted(rewards_by_step(sample.trajectory), gamma)
    return [
        Share(
            trajectory=Trajectory(name=sample.trajectory.name, steps=[step], reward=value),
            group_id=f"{sample.role}/{place}",
        )
        for place, (step, value) in enumerate(zip(steps, returns, strict=True))
    ]


def sampled_steps(trajectory: Trajectory) -> list[Step]:
    """The steps that sampled tokens: those in which the policy decided something."""
    return [step for step in trajectory.steps if step.response_ids]


def rewards_by_step(trajectory: Trajectory) -> list[float]:
    """What each step that sampled tokens earned; the last of them has the trajectory's reward where no step has its own.

    The reward of a step that sampled nothing goes to the one before it, which led there, or if there is none, to the first.
    """
    rewards: list[float] = []
    carried = 0.0
    for step in trajectory.steps:
        reward = float(step.reward or 0.0)
        if step.response_ids:
            rewards.append(carried + reward)
            carried = 0.0
        elif rewards:
            rewards[-1] += reward
        else:
            carried += reward
    if rewards and not any(is_scored(step.reward) for step in trajectory.steps):
        rewards[-1] = float(trajectory.final_reward() or 0.0)
    return rewards


def is_reference(trajectory: Trajectory) -> bool:
    """Whether it is scored, and not trained on but compared with."""
    return REFERENCE_KEY in trajectory.info and trajectory.final_reward() is not None


def grouped(shares: Iterable[Share]) -> dict[str, list[Share]]:
    """Shares by what they are compared with."""
    groups: dict[str, list[Share]] = {}
    for share in shares:
        groups.setdefault(share.group_id, []).append(share)
    return groups


def credit(
    groups: Mapping[str, list[Share]],
    references: Mapping[str, list[Trajectory]],
    algorithm: Algorithm,
    roles: Roles | None = None,
) -> None:
    """Give every share its advantage, or the reason why it has none.

    Args:
        groups: shares by group.
        references: scored trajectories that are not trained on, by the group that they are compared with.
        algorithm: what credits the roles that have no estimator of their own.
        roles: what sets trajectories of some names apart.

    Raises:
        ConfigError: if the algorithm does not give each one a number.
    """
    roles = roles or {}
    for estimator, theirs in _by_estimator(groups, algorithm, roles):
        _credit(theirs, references, estimator, keeps_uniform=algorithm.learns_without_advantage)
    for members in groups.values():
        weight = roles.get(members[0].trajectory.name, PLAIN).weight
        for share in members:
            share.advantage = weight * (share.advantage or 0.0)


def num_uniform(
    groups: Mapping[str, Sequence[Share]], references: Mapping[str, Sequence[Trajectory]], algorithm: Algorithm
) -> int:
    """How many groups were compared, and nobody in them was better than another. What a critic or a divergence makes of equal
    rewards is noise. Where every rollout is alone, they are compared with each other."""

    def alike(members: Sequence[Share], others: Sequence[Trajectory] = ()) -> bool:
        rewards = [item.final_reward() for item in (*(share.trajectory for share in members), *others)]
        return algorithm.needs_rewards and len(rewards) > 1 and len(set(rewards)) == 1

    compared = {
        name: members for name, members in groups.items() if not any(share.dropped in NOT_COMPARED for share in members)
    }
    each_alone = not references and all(len(members) == 1 for members in compared.values())
    if each_alone and alike(list(chain.from_iterable(compared.values()))):
        return len(compared)
    return sum(
        not any(share.advantage for share in members) or alike(members, references.get(name, ()))
        for name, members in compared.items()
    )


def _by_estimator(
    groups: Mapping[str, list[Share]], algorithm: Algorithm, roles: Roles
) -> list[tuple[Algorithm, dict[str, list[Share]]]]:
    """Each estimator with the groups that it credits; equal ones are one, so that groups of several roles are compared."""
    found: list[tuple[Algorithm, dict[str, list[Share]]]] = []  # no dict: settings of a user's algorithm may be lists
    for name, members in groups.items():
        estimator = roles.get(members[0].trajectory.name, PLAIN).estimator or algorithm
        theirs = next((theirs for known, theirs in found if known == estimator), None)
        if theirs is None:
            found.append((estimator, theirs := {}))
        theirs[name] = members
    return found


def _credit(
    groups: Mapping[str, list[Share]],
    references: Mapping[str, list[Trajectory]],
    estimator: Algorithm,
    *,
    keeps_uniform: bool,
) -> None:
    """Credit groups with one estimator. `keeps_uniform`: those that earned the same throughout are trained on, too."""
    enough = {}
    for name, members in groups.items():
        missing = _missing(members, references.get(name, []), estimator)
        if missing is None:
            enough[name] = members
        for share in members:
            share.advantage, share.dropped = 0.0, missing
    made = [
        TrajectoryGroup(
            trajectories=[share.trajectory for share in members],
            group_id=name,
            references=references.get(name, []),
            penalties=[share.penalty for share in members],
        )
        for name, members in enough.items()
    ]
    for group, members, advantages in zip(made, enough.values(), _credits(estimator, made), strict=True):
        baseline = estimator.baseline(group)
        uniform = not any(advantages)
        for share, advantage in zip(members, advantages, strict=True):
            share.baseline, share.advantage = baseline, advantage
            share.dropped = ZERO_VARIANCE if uniform and not keeps_uniform else None


def _missing(members: Sequence[Share], references: Sequence[Trajectory], algorithm: Algorithm) -> str | None:
    """Why a group cannot be compared, if so."""
    if len(members) < algorithm.min_group_size:
        return ALONE
    return NO_GREEDY if algorithm.needs_greedy and not references else None


def _credits(algorithm: Algorithm, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    """What the algorithm gives, which users write too, checked."""
    given = algorithm.credits(groups)
    for group, advantages in zip(groups, given, strict=True):
        if len(advantages) != len(group.trajectories) or not all(map(math.isfinite, advantages)):
            raise ConfigError(
                f"{type(algorithm).__name__} gave the rewards {group.rewards} of group {group.group_id!r} the advantages "
                f"{advantages}: give one finite number for each"
            )
    return given
