"""Random batches, in the layout of this project (one entry for each sampled token) and of others (padded rows)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.types import Step, Trajectory, TrajectoryGroup

from ..algorithms.values import batch_of

GROUP_SIZE, WIDTH = 4, 9


@dataclass(frozen=True)
class Rows:
    """Three groups of four answers of 1 to 6 tokens, with gaps that were not sampled, such as tool results."""

    seed: int

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] where a token was sampled."""
        chance = random.Random(self.seed)
        rows = [sorted(chance.sample(range(WIDTH), chance.randint(1, 6))) for _ in range(3 * GROUP_SIZE)]
        return torch.tensor([[float(place in row) for place in range(WIDTH)] for row in rows])

    @cached_property
    def groups_of(self) -> list[int]:
        """Group of each row."""
        return [row // GROUP_SIZE for row in range(len(self.mask))]

    def random(self, name: str, low: float = -1.0, high: float = 1.0) -> Tensor:
        """Return [N] numbers of this name, always the same."""
        chance = random.Random(f"{self.seed} {name}")
        return torch.tensor([chance.uniform(low, high) for _ in range(int(self.mask.sum()))])

    @cached_property
    def scores(self) -> Tensor:
        """Return [B] rewards of the answers."""
        chance = random.Random(f"{self.seed} scores")
        return torch.tensor([chance.choice([-1.0, 0.0, 0.5, 1.0]) for _ in range(len(self.mask))])

    @cached_property
    def score_rows(self) -> Tensor:
        """Return [B, T] with the score on the last sampled token."""
        last = self.mask.cumsum(1).argmax(1)
        return torch.zeros_like(self.mask).scatter(1, last[:, None], self.scores[:, None])

    def pad(self, values: Tensor) -> Tensor:
        """Convert [N] to [B, T]."""
        return torch.zeros_like(self.mask).masked_scatter(self.mask.bool(), values)

    def flat(self, rows: Tensor) -> Tensor:
        """Convert [B, T] to [N]."""
        return rows[self.mask.bool()]

    def groups(self) -> list[TrajectoryGroup]:
        members: list[list[Trajectory]] = [[] for _ in set(self.groups_of)]
        for row, group in enumerate(self.groups_of):
            step = Step(prompt_ids=[0], response_ids=[1] * int(self.mask[row].sum()))
            members[group].append(Trajectory(reward=float(self.scores[row]), steps=[step]))
        return [TrajectoryGroup(trajectories=items) for items in members]

    def by_token(self, advantages: list[list[float]]) -> Tensor:
        """Return [N] credits of each trajectory of each group, at its tokens."""
        rows = torch.tensor([value for group in advantages for value in group])
        return self.flat(rows[:, None].expand(-1, WIDTH))

    def batch(self) -> Batch:
        """Return the batch with random log-probabilities, values and advantages."""
        batch = batch_of(*([0.0] * int(size) for size in self.mask.sum(1)))
        batch.advantages = self.random("advantages", -2.0, 2.0)
        batch.old_logprobs = self.random("old", -3.0, -0.5)
        batch.ref_logprobs = batch.old_logprobs + self.random("reference", -0.5, 0.5)
        batch.values, batch.returns = self.random("values"), self.random("returns")
        return batch

    def moved(self, batch: Batch, by: float = 0.6) -> Tensor:
        """Return [N] log-probabilities after an update that changed each by at most `by`, for gradients."""
        assert batch.old_logprobs is not None
        return (batch.old_logprobs + self.random("moved", -by, by)).requires_grad_()
