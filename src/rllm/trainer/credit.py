"""Credit: episodes to credited sequences to a batch. Everything dropped is counted by reason.

Each stage is a function that returns new values. `assemble` runs them in order:

1. `samples_of`: trajectories with their token sequences and the units that are credited, or the reason to drop them.
2. `_whole_batch`, `_scored`: all tokens that can be learned from, with log-probabilities and values if the algorithm
   needs them.
3. `credited_groups` or `_token_credited`: advantages of units, from comparing groups, or of single tokens.
4. `_trained`: the sequences that can move the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, TokenSequence
from rllm.algorithms.losses import kl_divergence, pull_of_teacher
from rllm.backends.base import TrainingBackend
from rllm.config.schema import RoleConfig
from rllm.errors import ConfigError, counted
from rllm.store.codec import readable_json
from rllm.trainer.sequences import (
    StepKey,
    reordered,
    sequences_of,
    step_spans,
    sums_by_step,
    token_order,
    values_by_token,
)
from rllm.trainer.teacher import Teacher
from rllm.types import (
    DRIFT_KEY,
    NUM_SIDE_CALLS_KEY,
    NUM_UNUSABLE_CALLS_KEY,
    REFERENCE_KEY,
    Episode,
    Step,
    StepCredit,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
    discounted,
    grouped,
    is_scored,
)

T = TypeVar("T")

Roles: TypeAlias = Mapping[str, RoleConfig]
"""Settings of trajectories by their name; names that are missing have the defaults."""
Groups: TypeAlias = "Mapping[str, Sequence[CreditUnit]]"
References: TypeAlias = Mapping[str, Sequence[Trajectory]]
"""Scored trajectories of greedy rollouts, by the group that is compared with them."""

# Reasons to drop a trajectory or a step. Others are how an episode ended, such as `timeout`.
UNSCORED = "unscored"
FROZEN = "not_trainable"
NO_TOKENS = "no_tokens"
ALONE = "too_few_siblings"
NO_GREEDY = "no_greedy_rollout"
ZERO_VARIANCE = "zero_variance"
SIDE_CALL = "side_call"
UNUSABLE_CALL = "unusable_call"
NOT_COMPARED = (ALONE, NO_GREEDY)

DROPPED_KEY = "left_out"
"""Key of a trajectory's `info` that holds the reason to drop it, if a filter did."""
_DEFAULT_ROLE = RoleConfig()


@dataclass(frozen=True, kw_only=True)
class CreditUnit:
    """The steps that get one advantage: all steps of a trajectory, or a single one."""

    trajectory: Trajectory
    """The sample's own trajectory, or one with a single step, whose reward is that step's discounted return."""
    group_id: str
    penalty: float = 0.0
    """Subtracted from the reward."""
    baseline: float | None = None
    advantage: float | None = None
    """The mean over tokens, if single tokens are credited."""
    by_step: Mapping[str, float] = field(default_factory=dict)
    """Advantage of each step by its id, if steps of one unit differ; a mean over tokens, if tokens are credited."""
    dropped: str | None = None

    @property
    def steps(self) -> list[Step]:
        return self.trajectory.steps

    def step_advantage(self, step_id: str) -> float | None:
        """Return the advantage of one of its steps."""
        return self.by_step.get(step_id, self.advantage)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One trajectory of an episode, with what is trained on."""

    episode: Episode
    index: int
    """Index of the trajectory in its episode."""
    sequences: Sequence[TokenSequence] = ()
    units: Sequence[CreditUnit] = ()
    unusable: str | None = None
    """Reason for which it was dropped before credit; it has no units then."""

    @property
    def trajectory(self) -> Trajectory:
        return self.episode.trajectories[self.index]

    @property
    def role_key(self) -> str:
        """Task and name: trajectories that share both are compared with each other."""
        return f"{self.episode.task_id}/{self.trajectory.name}"

    @property
    def dropped(self) -> str | None:
        """Reason for which nothing of it is trained on; `None` if some of it is."""
        if self.unusable or not self.units:
            return self.unusable
        return self.units[0].dropped if all(unit.dropped for unit in self.units) else None


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A batch, with the records of how it was made."""

    batch: Batch
    """Only the sequences that can move the weights; the mean of the loss is still taken over all of them."""
    credits: list[StepCredit]
    """One for every step of every trajectory, dropped ones with the reason; `trainer_logprobs` is still missing."""
    trajectories: list[tuple[str, int]]
    """Session id, and index in its episode, of each trajectory, as numbered by `batch.trajectory_of`."""
    num_groups: int
    """Groups of trajectories, or of their steps, including those that `rollout.resample_rounds` replaced."""
    num_uniform_groups: int
    """Groups whose rewards are all equal, so that nothing is learned from them."""
    dropped: Counter[str]
    """Dropped trajectories by reason. A failed episode counts once; side calls and unusable calls count one by one."""
    num_forks: int
    """Steps that begin a sequence of their own, beyond the first of each trajectory."""
    num_steps: int
    drifts: Counter[str] = field(default_factory=Counter)
    """Steps whose prompt departs from the tokens of the answer before it, by reason; see `capture.Drift`."""
    advantages: list[float] = field(default_factory=list)
    """The advantage of every credited unit."""


def assemble(
    episodes: Sequence[Episode],
    algorithm: Algorithm,
    *,
    step: int,
    temperature: float,
    scorer: TrainingBackend | None = None,
    teacher: Teacher | None = None,
    roles: Roles | None = None,
) -> Assembled:
    """Return the batch of one training step, and its records.

    Args:
        episodes: of one training step.
        algorithm: credits them, and defines the loss.
        step: number of the training step, for the records.
        temperature: of the sampled tokens.
        scorer: computes log-probabilities and values, if the algorithm needs them.
        teacher: computes its log-probabilities, if the algorithm needs them.
        roles: settings of trajectories by name.

    Raises:
        TokenMismatchError: if ids and log-probabilities of a step disagree.
        ConfigError: if the algorithm does not return a finite number for each trajectory or token.
        InferenceError: from the teacher.
    """
    roles = roles or {}
    samples = samples_of(episodes, algorithm, roles)
    references = _references(samples, algorithm)
    usable = [sample for sample in samples if sample.unusable is None]
    whole = _whole_batch(usable, temperature)
    if algorithm.needs_scores:
        whole = _scored(whole, _required(scorer), algorithm)
    if algorithm.credits_tokens:
        whole = _token_credited(whole, usable, algorithm)
        usable = _with_token_means(usable, whole)
    else:
        usable = _with_penalties(usable, whole, algorithm)
        usable = _with_units(usable, credited_groups(groups_of(usable), references, algorithm, roles))
        if algorithm.step_coef:
            usable = _with_step_groups(usable, whole, algorithm, roles)
        advantages = {key: unit.step_advantage(key[1]) or 0.0 for key, unit in _units_by_step(usable)}
        whole = replace(whole, advantages=values_by_token(whole, advantages))
    if algorithm.needs_teacher and len(whole):
        whole = _taught(whole, usable, _required(teacher), algorithm, roles, scorer)
        usable = _with_token_means(usable, whole)
    batch = _trained(whole, usable, algorithm)
    if algorithm.needs_reference and batch.ref_logprobs is None and len(batch):
        batch = replace(batch, ref_logprobs=_required(scorer).score_reference(batch))
    credited = iter(usable)
    final = [next(credited) if sample.unusable is None else sample for sample in samples]
    return _with_records(batch, episodes, final, references, algorithm, step)


def samples_of(episodes: Sequence[Episode], algorithm: Algorithm, roles: Roles) -> list[Sample]:
    """Return the trajectories of episodes that did not fail, with sequences and units or the reason to drop them."""
    return [
        _sample(episode, index, algorithm, roles.get(trajectory.name, _DEFAULT_ROLE))
        for episode in episodes
        if not episode.failed
        for index, trajectory in enumerate(episode.trajectories)
    ]


def _sample(episode: Episode, index: int, algorithm: Algorithm, role: RoleConfig) -> Sample:
    trajectory = episode.trajectories[index]
    # Tokens of frozen trajectories need not line up: a judge may be a server without log-probabilities.
    if not (trajectory.trainable and role.trainable):
        return Sample(episode=episode, index=index, unusable=FROZEN)
    if reason := trajectory.info.get(DROPPED_KEY):
        return Sample(episode=episode, index=index, unusable=reason)
    sequences = sequences_of(trajectory.steps, demonstrated=algorithm.demonstrated)
    sample = Sample(episode=episode, index=index, sequences=sequences)
    if algorithm.needs_rewards and trajectory.final_reward() is None:
        return replace(sample, unusable=UNSCORED)
    if not sequences:
        return replace(sample, unusable=NO_TOKENS)
    return replace(sample, units=units_of(sample, algorithm.level, algorithm.gamma))


def units_of(sample: Sample, level: Literal["trajectory", "step"], gamma: float) -> list[CreditUnit]:
    """Return the units of a scored sample in order; at level step, one for each step that sampled tokens."""
    if level == "trajectory":
        return [CreditUnit(trajectory=sample.trajectory, group_id=sample.role_key)]
    steps = sampled_steps(sample.trajectory)
    returns = discounted(rewards_by_step(sample.trajectory), gamma)
    return [
        CreditUnit(
            trajectory=Trajectory(name=sample.trajectory.name, steps=[step], reward=value),
            group_id=f"{sample.role_key}/{place}",
        )
        for place, (step, value) in enumerate(zip(steps, returns, strict=True))
    ]


def sampled_steps(trajectory: Trajectory) -> list[Step]:
    """Return the steps in which the policy sampled tokens."""
    return [step for step in trajectory.steps if step.response_ids]


def rewards_by_step(trajectory: Trajectory) -> list[float]:
    """Return the reward of each step that sampled tokens.

    Without rewards of steps, the last one has the trajectory's. The reward of a step that sampled nothing is added to
    the sampling step before it, which caused it, or to the first one.
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
    """Return whether a trajectory is scored and compared with, but not trained on."""
    return REFERENCE_KEY in trajectory.info and trajectory.final_reward() is not None


def groups_of(samples: Iterable[Sample]) -> dict[str, list[CreditUnit]]:
    """Return the units of the samples by group."""
    return grouped((unit.group_id, unit) for sample in samples for unit in sample.units)


def _references(samples: Sequence[Sample], algorithm: Algorithm) -> dict[str, list[Trajectory]]:
    greedy = [
        replace(sample, units=units_of(sample, algorithm.level, algorithm.gamma))
        for sample in samples
        if is_reference(sample.trajectory)
    ]
    return {group_id: [unit.trajectory for unit in units] for group_id, units in groups_of(greedy).items()}


def credited_groups(
    groups: Groups, references: References, algorithm: Algorithm, roles: Roles | None = None
) -> dict[str, list[CreditUnit]]:
    """Return the groups with the advantage and baseline of each unit, or the reason why it cannot be compared.

    Raises `ConfigError` if the algorithm does not return one finite number for each unit.
    """
    given: dict[str, TrajectoryGroup] = {}
    missing: dict[str, str] = {}
    for name, units in groups.items():
        compared_with = list(references.get(name, ()))
        if len(units) < algorithm.min_group_size:
            missing[name] = ALONE
        elif algorithm.needs_greedy and not compared_with:
            missing[name] = NO_GREEDY
        else:
            paths, penalties = [unit.trajectory for unit in units], [unit.penalty for unit in units]
            given[name] = TrajectoryGroup(
                trajectories=paths, group_id=name, references=compared_with, penalties=penalties
            )
    advantages = dict(zip(given, algorithm.credits(list(given.values())), strict=True))
    for name, group in given.items():  # the algorithm may be the user's own
        if len(advantages[name]) != len(group.trajectories) or not all(map(math.isfinite, advantages[name])):
            raise ConfigError(
                f"{type(algorithm).__name__} returned the advantages {advantages[name]} for the rewards "
                f"{group.rewards} of group {name!r}: return one finite number for each"
            )
    credited: dict[str, list[CreditUnit]] = {}
    for name, units in groups.items():
        if name in missing:
            credited[name] = [replace(unit, advantage=0.0, dropped=missing[name]) for unit in units]
            continue
        weight = (roles or {}).get(units[0].trajectory.name, _DEFAULT_ROLE).weight
        is_uniform = not any(advantages[name]) and not algorithm.learns_without_advantage
        baseline, dropped = algorithm.baseline(given[name]), ZERO_VARIANCE if is_uniform else None
        credited[name] = [
            replace(unit, baseline=baseline, advantage=weight * (advantage or 0.0), dropped=dropped)
            for unit, advantage in zip(units, advantages[name], strict=True)
        ]
    return credited


def _with_units(samples: Sequence[Sample], groups: Groups) -> list[Sample]:
    """Return the samples with their units from `groups`, which list them in the order of the samples."""
    units = {name: iter(members) for name, members in groups.items()}
    return [replace(sample, units=[next(units[unit.group_id]) for unit in sample.units]) for sample in samples]


def _with_step_groups(usable: Sequence[Sample], whole: Batch, algorithm: Algorithm, roles: Roles) -> list[Sample]:
    """Return the samples with the advantage of each step, which comes from its trajectory and from its own group.

    The group of a step is all steps that had its observation, in any trajectory of the task and role (GiGPO).
    """
    steps = [replace(sample, units=_units_by_observation(sample, algorithm.gamma)) for sample in usable]
    steps = _with_penalties(steps, whole, algorithm)
    steps = _with_units(steps, credited_groups(groups_of(steps), {}, algorithm, roles))
    combined = []
    for sample, own in zip(usable, steps, strict=True):
        (unit,) = sample.units
        gains = {item.steps[0].id: algorithm.step_coef * (item.advantage or 0.0) for item in own.units}
        if unit.dropped not in NOT_COMPARED and any(gains.values()):
            by_step = {step_id: (unit.advantage or 0.0) + gain for step_id, gain in gains.items()}
            unit = replace(unit, by_step=by_step, dropped=None)
        combined.append(replace(sample, units=[unit]))
    return combined


def _units_by_observation(sample: Sample, gamma: float) -> list[CreditUnit]:
    """Return each step as a unit in the group of its observation: the agent's, or the last message of its prompt."""
    units = []
    for unit in units_of(sample, "step", gamma):
        (step,) = unit.steps
        seen = step.chat_completions[-2:-1] if step.observation is None else step.observation
        units.append(replace(unit, group_id=f"{sample.role_key}/{readable_json(seen, sort_keys=True).decode()}"))
    return units


def _whole_batch(usable: Sequence[Sample], temperature: float) -> Batch:
    rows = [(sequence, number) for number, sample in enumerate(usable) for sequence in sample.sequences]
    batch = Batch.of([sequence for sequence, _ in rows], temperature=temperature)
    trajectory_of = torch.tensor([number for _, number in rows], dtype=torch.long)[batch.sequence_of]
    return replace(batch, trajectory_of=trajectory_of)


def _scored(batch: Batch, scorer: TrainingBackend, algorithm: Algorithm) -> Batch:
    """Return the batch with the log-probabilities and values that credit depends on."""
    if not len(batch):
        return replace(batch, values=torch.zeros(0), energies=torch.zeros(0))
    if algorithm.penalizes_divergence:
        batch = replace(batch, old_logprobs=scorer.score(batch), ref_logprobs=scorer.score_reference(batch))
    if algorithm.needs_energies:
        batch = replace(batch, energies=scorer.energies(batch))
    return replace(batch, values=scorer.values(batch)) if algorithm.needs_values else batch


def _divergence(batch: Batch, algorithm: Algorithm) -> Tensor:
    """Return [N] the penalty of each token for its divergence from the reference model."""
    if not (algorithm.penalizes_divergence and len(batch)):
        return torch.zeros(batch.num_tokens)
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return algorithm.kl_coef * kl_divergence(batch.old_logprobs, batch.ref_logprobs, algorithm.divergence_estimator)


def _with_penalties(usable: Sequence[Sample], batch: Batch, algorithm: Algorithm) -> list[Sample]:
    """Return the samples with the divergence of each unit's tokens as penalty, discounted like rewards."""
    lost = sums_by_step(batch, _divergence(batch, algorithm))
    penalized = []
    for number, sample in enumerate(usable):
        own = [sum(lost.get((number, step.id), 0.0) for step in unit.steps) for unit in sample.units]
        penalties = discounted(own, algorithm.gamma)
        units = [replace(unit, penalty=penalty) for unit, penalty in zip(sample.units, penalties, strict=True)]
        penalized.append(replace(sample, units=units))
    return penalized


def _token_credited(batch: Batch, usable: Sequence[Sample], algorithm: Algorithm) -> Batch:
    """Return the batch with the algorithm's advantage of each token, from rewards at the last tokens of steps."""
    earned = {
        (number, step.id): reward
        for number, sample in enumerate(usable)
        for step, reward in zip(sampled_steps(sample.trajectory), rewards_by_step(sample.trajectory), strict=True)
    }
    rewards = -_divergence(batch, algorithm)
    for key, tokens in step_spans(batch):
        rewards[tokens.stop - 1] += earned[key]
    assert batch.trajectory_of is not None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(sample.role_key for sample in usable))}
    group_of = torch.tensor([numbers[sample.role_key] for sample in usable], dtype=torch.long)[batch.trajectory_of]
    batch = replace(batch, rewards=rewards, group_of=group_of)
    # A trajectory may continue one sequence after it has begun another, so its tokens need not be in order.
    order = token_order(batch, earned)
    advantages, returns = algorithm.token_advantages(reordered(batch, order))
    for values in (advantages, returns):
        # The algorithm may be the user's own. What a broken critic or reference made infinite is not its fault; the
        # backend skips such an update.
        is_broken = any(given is not None and not given.isfinite().all() for given in (batch.rewards, batch.values))
        if values is None or (values.shape == (batch.num_tokens,) and (is_broken or values.isfinite().all())):
            continue
        raise ConfigError(
            f"{type(algorithm).__name__}.token_advantages returned {values} for "
            f"{counted(batch.num_tokens, 'token')}: return a tensor of one finite number for each"
        )
    back = order.argsort()
    returns = None if returns is None else returns[back]
    return replace(batch, advantages=advantages[back], returns=returns, group_of=None, energies=None)


def _taught(
    batch: Batch,
    usable: Sequence[Sample],
    teacher: Teacher,
    algorithm: Algorithm,
    roles: Roles,
    scorer: TrainingBackend | None,
) -> Batch:
    """Return the batch with each token's advantage raised by how much likelier the teacher finds it than the policy.

    With a correction for older weights, "the policy" is the trainer's: relative to the weights that sampled them,
    tokens would be pushed again by what later updates have already done.
    """
    if algorithm.correction != "none" and batch.old_logprobs is None:
        batch = replace(batch, old_logprobs=_required(scorer).score(batch))
    assert batch.trajectory_of is not None
    weight_of = [roles.get(sample.trajectory.name, _DEFAULT_ROLE).weight for sample in usable]
    weights = torch.tensor(weight_of)[batch.trajectory_of]
    own = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert own is not None, "a teacher scores what was sampled"
    teacher_logprobs = teacher.score(batch, usable)
    pull = pull_of_teacher(own, teacher_logprobs)
    advantages = batch.advantages + algorithm.teacher_coef * weights * pull
    return replace(batch, teacher_logprobs=teacher_logprobs, advantages=advantages)


def _with_token_means(usable: Sequence[Sample], batch: Batch) -> list[Sample]:
    """Return the samples with the mean advantage of the tokens of each unit and step, for the records."""
    totals = sums_by_step(batch, batch.advantages)
    averaged = []
    for number, sample in enumerate(usable):
        units = []
        for unit in sample.units:
            sizes = {step.id: len(step.response_ids) for step in sampled_steps(unit.trajectory)}
            by_step = {step_id: totals[number, step_id] / size for step_id, size in sizes.items()}
            mean = sum(totals[number, step_id] for step_id in sizes) / sum(sizes.values())
            units.append(replace(unit, by_step=by_step, advantage=mean))
        averaged.append(replace(sample, units=units))
    return averaged


def _trained(whole: Batch, usable: Sequence[Sample], algorithm: Algorithm) -> Batch:
    """Return the sequences that can move the weights, with loss weights over all sequences that were compared."""
    compared = {key for key, unit in _units_by_step(usable) if unit.dropped not in NOT_COMPARED}
    counts = {int(whole.sequence_of[tokens.start]) for key, tokens in step_spans(whole) if key in compared}
    batch = whole.select(sorted(counts)).with_weights(algorithm.aggregation, algorithm.fixed_length)
    if algorithm.learns_without_advantage:
        return batch
    return batch.select(sorted(set(batch.sequence_of[batch.advantages != 0.0].tolist())))


def _with_records(
    batch: Batch,
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    references: References,
    algorithm: Algorithm,
    step: int,
) -> Assembled:
    usable = [sample for sample in samples if sample.unusable is None]
    trained = [sample for sample in usable if sample.dropped is None]
    groups = groups_of(usable)
    # Groups of several that a filter dropped because none did better than another.
    sizes = Counter(sample.role_key for sample in samples if sample.unusable == ZERO_VARIANCE)
    num_replaced = sum(size > 1 for size in sizes.values())
    dropped = Counter(sample.dropped for sample in samples if sample.dropped)
    dropped.update(failure_reason(episode) for episode in episodes if episode.failed)
    for reason, key in ((SIDE_CALL, NUM_SIDE_CALLS_KEY), (UNUSABLE_CALL, NUM_UNUSABLE_CALLS_KEY)):
        dropped[reason] += sum(sample.trajectory.info.get(key, 0) for sample in samples)
    drifts = (each.info.get(DRIFT_KEY) for sample in trained for each in sample.trajectory.steps)
    return Assembled(
        batch=batch,
        credits=[credit for sample in samples for credit in _step_credits(sample, step)],
        trajectories=[(sample.episode.session_id, sample.index) for sample in usable],
        num_groups=len(groups) + num_replaced,
        num_uniform_groups=num_uniform_groups(groups, references, algorithm) + num_replaced,
        dropped=+dropped,
        num_forks=sum(len(sample.sequences) - 1 for sample in trained),
        num_steps=sum(len(sample.trajectory.steps) for sample in trained),
        drifts=Counter(drift for drift in drifts if drift is not None),
        advantages=[unit.advantage for sample in usable for unit in sample.units if unit.advantage is not None],
    )


def num_uniform_groups(groups: Groups, references: References, algorithm: Algorithm) -> int:
    """Return the number of compared groups in which no unit did better than another.

    Differences that a critic or a divergence penalty adds to equal rewards are noise. Groups of one are compared with
    each other.
    """

    def are_equal(units: Sequence[CreditUnit], others: Sequence[Trajectory] = ()) -> bool:
        rewards = [algorithm.compared(item) for item in (*(unit.trajectory for unit in units), *others)]
        may_be_equal = algorithm.needs_rewards and algorithm.compares_rollouts
        return may_be_equal and len(rewards) > 1 and len(set(rewards)) == 1

    compared = {
        name: units for name, units in groups.items() if not any(unit.dropped in NOT_COMPARED for unit in units)
    }
    all_single = not references and all(len(units) == 1 for units in compared.values())
    if all_single and are_equal(list(chain.from_iterable(compared.values()))):
        return len(compared)
    return sum(
        not any(unit.advantage for unit in units) or are_equal(units, references.get(name, ()))
        for name, units in compared.items()
    )


def failure_reason(episode: Episode) -> str:
    """Return how a failed episode ended, such as `timeout`; `error` if its code or a server raised."""
    return (episode.termination_reason or TerminationReason.ERROR).value


def _units_by_step(usable: Sequence[Sample]) -> Iterator[tuple[StepKey, CreditUnit]]:
    for number, sample in enumerate(usable):
        for unit in sample.units:
            for step in unit.steps:
                yield (number, step.id), unit


def _step_credits(sample: Sample, training_step: int) -> Iterator[StepCredit]:
    """Yield the record of each step, and set the step's own `advantage`, which users read."""
    units = {step.id: unit for unit in sample.units for step in unit.steps}
    for step in sample.trajectory.steps:
        unit = units.get(step.id)
        credit = StepCredit(
            trace_id=step.id,
            session_id=sample.episode.session_id,
            training_step=training_step,
            episode_id=sample.episode.id,
            trajectory_name=sample.trajectory.name,
            trajectory_index=sample.index,
            reward=sample.trajectory.final_reward(),
            dropped=sample.unusable,
        )
        if unit is not None:
            step.advantage = unit.step_advantage(step.id)
            credit = replace(
                credit,
                reward=unit.trajectory.final_reward(),
                group_id=unit.group_id,
                baseline=unit.baseline,
                advantage=step.advantage,
                dropped=unit.dropped,
            )
        yield credit if step.response_ids else replace(credit, dropped=NO_TOKENS)


def _required(source: T | None) -> T:
    assert source is not None, "an algorithm that needs a scorer or a teacher is given one"
    return source
