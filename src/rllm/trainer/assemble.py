"""Episodes to a batch: group, credit, and turn into token sequences; whatever is left out is counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import kl_divergence, pull_of_teacher
from rllm.errors import ConfigError, counted
from rllm.trainer.failed import reason_of
from rllm.trainer.filters import LEFT_OUT
from rllm.trainer.roles import PLAIN, Role, Roles
from rllm.trainer.sequences import sequences_of
from rllm.trainer.shares import (
    FROZEN,
    NO_TOKENS,
    NOT_COMPARED,
    SIDE_CALL,
    UNSCORED,
    UNUSABLE_CALL,
    ZERO_VARIANCE,
    Sample,
    Share,
    credit,
    grouped,
    is_reference,
    num_uniform,
    rewards_by_step,
    sampled_steps,
    shares_of,
)
from rllm.trainer.tokens import Key, by_step, by_token, order_of, reordered, spans
from rllm.types import (
    DRIFT_KEY,
    NUM_SIDE_CALLS_KEY,
    NUM_UNUSABLE_CALLS_KEY,
    Episode,
    StepCredit,
    Trajectory,
    discounted,
)

T = TypeVar("T")


class Scorer(Protocol):
    """What is asked of a `TrainingBackend` where an algorithm needs more than rewards; see there."""

    def score(self, batch: Batch) -> Tensor: ...
    def score_reference(self, batch: Batch) -> Tensor: ...
    def values(self, batch: Batch) -> Tensor: ...


class Teacher(Protocol):
    """A model that the policy learns from, and whose tokens are the policy's. Blocks, and is asked from a thread."""

    def score(self, batch: Batch) -> Tensor:
        """[N] the teacher's log-probabilities of the batch's tokens.

        Raises:
            InferenceError: if it cannot be reached, or does not tell them.
        """
        ...


@dataclass(kw_only=True)
class Assembled:
    """A batch, and how it came about."""

    batch: Batch
    """Only sequences that can move the weights; the others do count in the loss's mean."""
    credits: list[StepCredit]
    """One for every step of every trajectory, dropped ones with the reason; `trainer_logprobs` is still missing."""
    trajectories: list[tuple[str, int]]
    """Those that `batch.trajectory_of` counts: the session of each, and which of its episode's it is."""
    num_groups: int
    """Groups of trajectories, or of their steps; with those that `rollout.resample_rounds` replaced by others."""
    num_uniform_groups: int
    """Groups whose rewards are all alike, which have nothing to teach."""
    dropped: Counter[str]
    """Trajectories by the reason for which they were left out; failed episodes count once, side calls and unusable calls each."""
    num_forks: int
    """Steps whose prompt does not continue the steps before them, beyond the first step of each trajectory."""
    num_steps: int
    drifts: Counter[str] = field(default_factory=Counter)
    """Steps whose prompt does not go on from the tokens of the answer that it follows, by reason; see `capture.Drift`."""
    advantages: list[float] = field(default_factory=list)
    """Of every share that was credited."""


def assemble(
    episodes: Sequence[Episode],
    algorithm: Algorithm,
    *,
    step: int,
    temperature: float,
    scorer: Scorer | None = None,
    teacher: Teacher | None = None,
    roles: Roles | None = None,
) -> Assembled:
    """Turn the episodes of one training step into what the optimiser is fed.

    Args:
        episodes: of one training step.
        algorithm: what credits, and gives the loss.
        step: which training step this is, for the records.
        temperature: that the episodes were sampled with.
        scorer: is asked for log-probabilities and values where the algorithm needs them; may be left out where not.
        teacher: is asked for log-probabilities where the algorithm needs them; may be left out where not.
        roles: what sets trajectories of some names apart.

    Raises:
        TokenMismatchError: if ids and log-probabilities of a step disagree.
        ConfigError: if the algorithm does not give each trajectory, or token, a number.
        InferenceError: of the teacher.
    """
    roles = roles or {}
    samples = _samples(episodes, algorithm, roles)
    usable = [sample for sample in samples if sample.dropped is None]
    groups = grouped(share for sample in usable for share in sample.shares)
    references = _references(samples, algorithm)
    whole = _whole(usable, temperature)
    if algorithm.needs_scores:
        _score(whole, _given(scorer), algorithm)
    if algorithm.credits_tokens:
        _credit_tokens(whole, usable, algorithm)
    else:
        _penalise(whole, usable, algorithm)
        credit(groups, references, algorithm, roles)
        _give_to_tokens(whole, usable)
    if algorithm.needs_teacher and len(whole):
        _add_teacher(_given(teacher), whole, usable, algorithm, roles, scorer)
    batch = _trained(whole, usable, algorithm)
    if algorithm.needs_reference and batch.ref_logprobs is None and len(batch):
        batch.ref_logprobs = _given(scorer).score_reference(batch)
    return _with_counts(batch, episodes, samples, usable, groups, references, algorithm, step)


def _given(asked: T | None) -> T:
    """The scorer or the teacher that the algorithm needs."""
    assert asked is not None, "an algorithm that needs a scorer, or a teacher, is given one"
    return asked


def _samples(episodes: Sequence[Episode], algorithm: Algorithm, roles: Roles) -> list[Sample]:
    """Every trajectory of the episodes that did not fail."""
    return [
        _sample(episode, index, algorithm, roles.get(trajectory.name, PLAIN))
        for episode in episodes
        if not episode.failed
        for index, trajectory in enumerate(episode.trajectories)
    ]


def _sample(episode: Episode, index: int, algorithm: Algorithm, role: Role) -> Sample:
    """A trajectory with its sequences and shares, or if it cannot be learned from, with the reason.

    Tokens of what is not trained on need not line up: a judge may be a server that gives no log-probabilities.
    """
    sample = Sample(episode=episode, index=index)
    trajectory = sample.trajectory
    if not (trajectory.trainable and role.trainable):
        sample.dropped = FROZEN
        return sample
    if reason := trajectory.info.get(LEFT_OUT):
        sample.dropped = reason
        return sample
    sample.sequences = sequences_of(trajectory.steps, demonstrated=algorithm.demonstrated)
    if algorithm.needs_rewards and trajectory.final_reward() is None:
        sample.dropped = UNSCORED
    elif not sample.sequences:
        sample.dropped = NO_TOKENS
    else:
        sample.shares = shares_of(sample, algorithm.level, algorithm.gamma)
    return sample


def _references(samples: Sequence[Sample], algorithm: Algorithm) -> dict[str, list[Trajectory]]:
    """Scored trajectories of greedy attempts, by the group that is compared with them."""
    greedy = [item for item in samples if is_reference(item.trajectory)]
    shares = grouped(share for sample in greedy for share in shares_of(sample, algorithm.level, algorithm.gamma))
    return {group_id: [share.trajectory for share in members] for group_id, members in shares.items()}


def _whole(usable: Sequence[Sample], temperature: float) -> Batch:
    """All that can be learned from, before it is known what of it is worth it."""
    rows = [(sequence, number) for number, sample in enumerate(usable) for sequence in sample.sequences]
    batch = Batch.of([sequence for sequence, _ in rows], temperature=temperature)
    batch.trajectory_of = torch.tensor([number for _, number in rows], dtype=torch.long)[batch.sequence_of]
    return batch


def _score(batch: Batch, scorer: Scorer, algorithm: Algorithm) -> None:
    """What the trainer, the reference and the critic think of the tokens, as far as rewards are credited by it."""
    if not len(batch):
        batch.values = torch.zeros(0)
        return
    if algorithm.penalises_divergence:
        batch.old_logprobs = scorer.score(batch)
        batch.ref_logprobs = scorer.score_reference(batch)
    if algorithm.needs_values:
        batch.values = scorer.values(batch)


def _divergence(batch: Batch, algorithm: Algorithm) -> Tensor:
    """[N] what each token's divergence from the reference takes off its reward."""
    if not (algorithm.penalises_divergence and len(batch)):
        return torch.zeros(batch.num_tokens)
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return algorithm.kl_coef * kl_divergence(batch.old_logprobs, batch.ref_logprobs, algorithm.divergence_estimator)


def _add_teacher(
    teacher: Teacher,
    batch: Batch,
    usable: Sequence[Sample],
    algorithm: Algorithm,
    roles: Roles,
    scorer: Scorer | None,
) -> None:
    """Add to each token's advantage how much likelier the teacher finds it than the policy did, and keep the means.

    Where sampler and trainer may differ, "the policy" is the trainer's: measured from the older weights that sampled them,
    tokens would be pushed once more by what the updates since then have done already.
    """
    if algorithm.correction != "none" and batch.old_logprobs is None:
        batch.old_logprobs = _given(scorer).score(batch)
    assert batch.trajectory_of is not None
    weights = torch.tensor([roles.get(sample.trajectory.name, PLAIN).weight for sample in usable])[batch.trajectory_of]
    own = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert own is not None, "a teacher judges what was sampled"
    batch.teacher_logprobs = teacher.score(batch)
    pull = pull_of_teacher(own, batch.teacher_logprobs)
    batch.advantages = batch.advantages + algorithm.teacher_coef * weights * pull
    _keep_means(batch, usable)


def _penalise(batch: Batch, usable: Sequence[Sample], algorithm: Algorithm) -> None:
    """Take the divergence of each share's tokens off its reward, and as rewards are, that of later shares with discount."""
    lost = by_step(batch, _divergence(batch, algorithm), Tensor.sum)
    for number, sample in enumerate(usable):
        own = [sum(lost.get((number, step.id), 0.0) for step in share.steps) for share in sample.shares]
        for share, penalty in zip(sample.shares, discounted(own, algorithm.gamma), strict=True):
            share.penalty = penalty


def _credit_tokens(batch: Batch, usable: Sequence[Sample], algorithm: Algorithm) -> None:
    """Lay rewards on the last tokens of steps, let the algorithm credit all tokens, and keep the means."""
    earned = {
        (number, step.id): reward
        for number, sample in enumerate(usable)
        for step, reward in zip(sampled_steps(sample.trajectory), rewards_by_step(sample.trajectory), strict=True)
    }
    batch.rewards = -_divergence(batch, algorithm)
    for key, tokens in spans(batch):
        batch.rewards[tokens.stop - 1] += earned[key]
    # A trajectory may have gone on with a sequence after it had begun another, so its tokens are not yet in order.
    order = order_of(batch, earned)
    advantages, returns = algorithm.token_advantages(reordered(batch, order))
    for given in (advantages, returns):
        if given is not None:
            _check_numbers(given, batch, algorithm)
    back = order.argsort()
    batch.advantages = advantages[back]
    batch.returns = None if returns is None else returns[back]
    _keep_means(batch, usable)


def _check_numbers(given: Tensor, batch: Batch, algorithm: Algorithm) -> None:
    """Refuse what an algorithm gives, which users write too, unless it is a number for each token.

    What follows from a lost critic or reference is not its fault: the update is left out, and told of.
    """
    is_lost = any(numbers is not None and not numbers.isfinite().all() for numbers in (batch.rewards, batch.values))
    if given.shape != (batch.num_tokens,) or not (is_lost or given.isfinite().all()):
        raise ConfigError(
            f"token_advantages of {type(algorithm).__name__} gave {given} for {counted(batch.num_tokens, 'token')}: give a tensor "
            "of one finite number for each"
        )


def _give_to_tokens(batch: Batch, usable: Sequence[Sample]) -> None:
    """Give each token the advantage of its share."""
    batch.advantages = by_token(batch, {key: share.advantage or 0.0 for key, share in _credited(usable)})


def _keep_means(batch: Batch, usable: Sequence[Sample]) -> None:
    """Note on each share, and for each of its steps, the mean of what its tokens were credited with, for the records."""
    totals = by_step(batch, batch.advantages, Tensor.sum)
    for number, sample in enumerate(usable):
        for share in sample.shares:
            sizes = {step.id: len(step.response_ids) for step in sampled_steps(share.trajectory)}
            share.by_step = {step_id: totals[number, step_id] / size for step_id, size in sizes.items()}
            share.advantage = sum(totals[number, step_id] for step_id in sizes) / sum(sizes.values())


def _trained(whole: Batch, usable: Sequence[Sample], algorithm: Algorithm) -> Batch:
    """All credited sequences weigh in the loss's mean; those that cannot move the weights need no forward pass and are cut."""
    compared = {key for key, share in _credited(usable) if share.dropped not in NOT_COMPARED}
    counted = {int(whole.sequence_of[tokens.start]) for key, tokens in spans(whole) if key in compared}
    batch = whole.select(sorted(counted)).with_weights(algorithm.aggregation, algorithm.fixed_length)
    if algorithm.learns_without_advantage:
        return batch
    moving = set(batch.sequence_of[batch.advantages != 0.0].tolist())
    return batch.select(sorted(moving))


def _with_counts(
    batch: Batch,
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    usable: Sequence[Sample],
    groups: Mapping[str, Sequence[Share]],
    references: Mapping[str, Sequence[Trajectory]],
    algorithm: Algorithm,
    step: int,
) -> Assembled:
    """The batch with what is to be known of how it came about."""
    trained = [sample for sample in usable if sample.reason is None]
    num_replaced = _num_replaced(samples)
    return Assembled(
        batch=batch,
        credits=[item for sample in samples for item in _step_credits(sample, step)],
        trajectories=[(sample.episode.session_id, sample.index) for sample in usable],
        num_groups=len(groups) + num_replaced,
        num_uniform_groups=num_uniform(groups, references, algorithm) + num_replaced,
        dropped=_dropped(samples, episodes),
        num_forks=sum(len(sample.sequences) - 1 for sample in trained),
        num_steps=sum(len(sample.trajectory.steps) for sample in trained),
        drifts=_drifts(trained),
        advantages=[share.advantage for sample in usable for share in sample.shares if share.advantage is not None],
    )


def _dropped(samples: Sequence[Sample], episodes: Sequence[Episode]) -> Counter[str]:
    """What nothing is learned from, by reason: trajectories, failed episodes once, and each side call and unusable call."""
    dropped = Counter(sample.reason for sample in samples if sample.reason)
    dropped.update(reason_of(episode) for episode in episodes if episode.failed)
    for reason, key in ((SIDE_CALL, NUM_SIDE_CALLS_KEY), (UNUSABLE_CALL, NUM_UNUSABLE_CALLS_KEY)):
        dropped[reason] += sum(sample.trajectory.info.get(key, 0) for sample in samples)
    return +dropped


def _drifts(trained: Sequence[Sample]) -> Counter[str]:
    """Steps whose prompts drifted, by reason."""
    steps = (step for sample in trained for step in sample.trajectory.steps)
    return Counter(step.info[DRIFT_KEY] for step in steps if DRIFT_KEY in step.info)


def _num_replaced(samples: Sequence[Sample]) -> int:
    """Groups that were left out before they were credited, because none of several was better than another."""
    return sum(size > 1 for size in Counter(item.role for item in samples if item.dropped == ZERO_VARIANCE).values())


def _credited(usable: Sequence[Sample]) -> Iterator[tuple[Key, Share]]:
    """Every step, with the share that it belongs to."""
    return (
        ((number, step.id), share)
        for number, sample in enumerate(usable)
        for share in sample.shares
        for step in share.steps
    )


def _step_credits(sample: Sample, training_step: int) -> Iterator[StepCredit]:
    shares = {step.id: share for share in sample.shares for step in share.steps}
    for step in sample.trajectory.steps:
        share = shares.get(step.id)
        known = StepCredit(
            trace_id=step.id,
            session_id=sample.episode.session_id,
            training_step=training_step,
            episode_id=sample.episode.id,
            trajectory_name=sample.trajectory.name,
            trajectory_index=sample.index,
            reward=sample.trajectory.final_reward(),
            dropped=sample.dropped,
        )
        if share is not None:
            step.advantage = share.by_step.get(step.id, share.advantage)
            known = replace(
                known,
                reward=share.trajectory.final_reward(),
                group_id=share.group_id,
                baseline=share.baseline,
                advantage=step.advantage,
                dropped=share.dropped,
            )
        yield known if step.response_ids else replace(known, dropped=NO_TOKENS)
