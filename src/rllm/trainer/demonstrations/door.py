"""Demonstrations as episodes: shown to the policy instead of rolled out, and judged by how likely it finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.backends.base import TrainingBackend
from rllm.data.dataset import Dataset
from rllm.engine.failures import why_failed
from rllm.engine.request import RolloutRequest
from rllm.errors import ConfigError
from rllm.store.base import TraceStore
from rllm.trainer.credit import Roles, assemble
from rllm.trainer.demonstrations.rows import FIELD, Demonstration
from rllm.trainer.doors import Door, RunningRollout, Surroundings
from rllm.trainer.judge import Judge
from rllm.trainer.metrics.measure import rewards_of
from rllm.types import Episode


@dataclass(frozen=True, kw_only=True)
class DemonstrationDoor(Door):
    """Rows of `demonstrations.prepared`."""

    demonstrates: ClassVar[bool] = True

    def check(self, data: Dataset) -> None:
        for number, row in enumerate(data):
            if not isinstance(row.get(FIELD), Demonstration):
                raise ConfigError(f"row {number} is no demonstration: use AgentSFTTrainer, which prepares the rows")

    def open(self, around: Surroundings) -> RunningRollout:
        return Demonstrator(around.store)

    def judge(self, algorithm: Algorithm, backend: TrainingBackend, roles: Roles) -> Judge:
        return DemonstrationJudge(algorithm=algorithm, backend=backend, roles=roles)


class Demonstrator(AbstractContextManager["Demonstrator"]):
    """A `Rollout` that asks nobody. The store gets a session for what the trainer notes, and no traces: nothing was called."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    def __exit__(self, *_: object) -> None:
        """There is nothing to stop."""

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """The attempt's row as an episode."""
        if attempt.trainable:
            about = {name: getattr(attempt, name) for name in ("task_id", "index", "split", "run_id")}
            await asyncio.wrap_future(self._store.open_session(attempt.session_id, about))
        return Episode(
            task=attempt.task,
            task_id=attempt.task_id,
            index=attempt.index,
            session_id=attempt.session_id,
            trajectories=[attempt.task[FIELD].trajectory()],
        )


@dataclass(frozen=True, kw_only=True)
class DemonstrationJudge:
    """Looks at likelihoods."""

    algorithm: Algorithm
    backend: TrainingBackend
    roles: Roles

    def why_unusable(self, episode: Episode) -> str | None:
        return why_failed(episode)

    def of_training(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """`sft/reward`: what demonstrations that were sampled and scored had earned."""
        rewards = rewards_of(episodes)
        return {"sft/reward": fmean(rewards)} if rewards else {}

    def of_evaluation(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """`eval/loss`, as the training's; `eval/perplexity`, by the mean over tokens whatever the loss is a mean of."""
        batch = assemble(episodes, self.algorithm, step=0, temperature=1.0, roles=self.roles).batch
        logprobs = self.backend.score(batch).float()
        losses, _ = self.algorithm.surrogate(logprobs, logprobs, batch)
        return {
            "eval/loss": float((losses * batch.weights).sum()),
            "eval/perplexity": float((-logprobs.mean()).exp()),
            "eval/num_tokens": float(batch.num_tokens),
            "eval/num_episodes": float(len(episodes)),
        }
