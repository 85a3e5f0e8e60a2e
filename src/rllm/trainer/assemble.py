"""Episodes to a batch: group, credit, and turn into token sequences; whatever is left out is counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, TokenSequence
from rllm.trainer.sequences import sequences_of
from rllm.types import Episode, StepCredit, Trajectory, TrajectoryGroup

FAILED, UNSCORED, FROZEN, NO_TOKENS, ALONE, ZERO_VARIANCE = (
    "failed",
    "unscored",
    "not_trainable",
    "no_tokens",
    "too_few_siblings",
    "zero_variance",
)


@dataclass(kw_only=True)
class Assembled:
    """A batch, and how it came about."""

    batch: Batch
    """Only sequences with an advantage; the others cannot move the weights. They do count in the loss's mean."""
    credits: list[StepCredit]
    """One for every step of every episode, dropped ones with the reason; `trainer_logprobs` is still missing."""
    num_groups: int
    num_uniform_groups: int
    """Groups whose rewards are all alike, which have nothing to teach."""
    dropped: Counter[str]
    """Trajectories by the reason for which they were left out; failed episodes count once."""
    num_forks: int
    """Steps whose prompt does not continue the steps before them, beyond the first step of each trajectory."""
    num_steps: int


@dataclass(kw_only=True)
class _Sample:
    """One trajectory on its way into the batch."""

    episode: Episode
    trajectory: Trajectory
    sequences: list[TokenSequence] = field(default_factory=list)
    group_id: str | None = None
    baseline: float | None = None
    advantage: float | None = None
    dropped: str | None = None


def assemble(episodes: Sequence[Episode], algorithm: Algorithm, *, step: int, temperature: float) -> Assembled:
    """Turn the episodes of one training step into what the optimiser is fed.

    Raises:
        TokenMismatchError: if ids and log-probabilities of a step disagree.
    """
    samples = [
        _sample(episode, trajectory)
        for episode in episodes
        if not episode.failed
        for trajectory in episode.trajectories
    ]
    groups = _groups(samples)
    for group_id, members in groups.items():
        _credit(group_id, members, algorithm)
    dropped = Counter(sample.dropped for sample in samples if sample.dropped)
    dropped[FAILED] += sum(episode.failed for episode in episodes)
    trained = [sample for sample in samples if sample.dropped is None]
    counted = [sample for sample in samples if sample.dropped in (None, ZERO_VARIANCE)]
    return Assembled(
        batch=_batch(counted, algorithm, temperature),
        credits=[credit for sample in samples for credit in _step_credits(sample, step)],
        num_groups=len(groups),
        num_uniform_groups=sum(all(item.dropped for item in members) for members in groups.values()),
        dropped=+dropped,
        num_forks=sum(max(len(sample.sequences) - 1, 0) for sample in trained),
        num_steps=sum(len(sample.trajectory.steps) for sample in trained),
    )


def _sample(episode: Episode, trajectory: Trajectory) -> _Sample:
    """A trajectory with its sequences, and if it cannot be learned from, with the reason.

    Tokens of what is not trained on need not line up: a judge may be a server that gives no log-probabilities.
    """
    sample = _Sample(episode=episode, trajectory=trajectory)
    if not trajectory.trainable:
        sample.dropped = FROZEN
        return sample
    sample.sequences = sequences_of(trajectory.steps)
    if trajectory.final_reward() is None:
        sample.dropped = UNSCORED
    elif not sample.sequences:
        sample.dropped = NO_TOKENS
    return sample


def _groups(samples: Sequence[_Sample]) -> dict[str, list[_Sample]]:
    """Usable samples by task and role."""
    groups: dict[str, list[_Sample]] = {}
    for sample in samples:
        if sample.dropped is None:
            groups.setdefault(f"{sample.episode.task_id}/{sample.trajectory.name}", []).append(sample)
    return groups


def _credit(group_id: str, members: list[_Sample], algorithm: Algorithm) -> None:
    group = TrajectoryGroup(trajectories=[sample.trajectory for sample in members], group_id=group_id)
    enough = len(members) >= algorithm.min_group_size
    advantages = algorithm.credit(group) if enough else [0.0] * len(members)
    baseline = algorithm.baseline(group) if enough else None
    uniform = not any(advantages)
    for sample, advantage in zip(members, advantages, strict=True):
        sample.group_id, sample.baseline, sample.advantage = group_id, baseline, advantage
        if uniform:
            sample.dropped = ZERO_VARIANCE if enough else ALONE


def _batch(counted: Sequence[_Sample], algorithm: Algorithm, temperature: float) -> Batch:
    """All counted sequences weigh in the loss's mean; those without an advantage need no forward pass and are cut."""
    rows = [(sequence, sample.advantage or 0.0) for sample in counted for sequence in sample.sequences]
    whole = Batch.of([sequence for sequence, _ in rows], temperature=temperature).with_weights(algorithm.aggregation)
    whole.advantages = torch.tensor([advantage for _, advantage in rows], dtype=torch.float32)[whole.sequence_of]
    return whole.select([index for index, (_, advantage) in enumerate(rows) if advantage != 0.0])


def _step_credits(sample: _Sample, training_step: int) -> Iterator[StepCredit]:
    for step in sample.trajectory.steps:
        step.advantage = sample.advantage
        yield StepCredit(
            trace_id=step.id,
            session_id=sample.episode.session_id,
            training_step=training_step,
            episode_id=sample.episode.id,
            trajectory_name=sample.trajectory.name,
            reward=sample.trajectory.final_reward(),
            group_id=sample.group_id,
            baseline=sample.baseline,
            advantage=sample.advantage,
            dropped=sample.dropped if step.response_ids else NO_TOKENS,
        )
