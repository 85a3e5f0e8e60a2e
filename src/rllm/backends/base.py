"""What a training backend does: hold the weights, sample from them, update them, and keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.inference.engine import InferenceEngine

BACKENDS: Mapping[str, str] = {
    "local": "rllm.backends.local.backend:LocalBackend",
    "verl": "rllm.backends.verl.backend:VerlBackend",
}
"""Short names for `backend`."""


@dataclass(kw_only=True)
class UpdateResult:
    """What an update did."""

    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = None
    """[N] the trainer's log-probabilities before the update, aligned as the batch."""
    entropies: Tensor | None = None
    """[N] of what each token was drawn from, in nats, when the update first came by it; `None` where nobody looked."""
    ratios: Tensor | None = None
    """[N] how much likelier each token had become when the update last came by it; 1 throughout for a single update."""


class TrainingBackend(Protocol):
    """Where the weights live. All methods block; the loop calls them from a thread."""

    @classmethod
    def check(cls, config: Any) -> None:
        """Look at a `TrainConfig` before anything is loaded or written.

        Raises:
            ConfigError: if a setting cannot be used, or would have no effect.
        """
        ...

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The backend of a `TrainConfig`, its model loaded.

        Raises:
            ConfigError: if a setting cannot be used.
        """
        ...

    @property
    def inference(self) -> InferenceEngine:
        """Samples from the published weights."""
        ...

    @property
    def weight_version(self) -> int:
        """Counts the publishes of this run; every trace says which version sampled it."""
        ...

    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities of the batch's tokens under the current weights, without gradient."""
        ...

    def score_reference(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the weights that the run began with.

        Raises:
            ConfigError: if the backend has no reference.
        """
        ...

    def values(self, batch: Batch) -> Tensor:
        """[N] the critic's estimates at each token, of what is earned from it on.

        Raises:
            ConfigError: if the backend has no critic.
        """
        ...

    def update(self, batch: Batch, algorithm: Algorithm) -> UpdateResult:
        """Improve the weights on a batch; with `batch.returns`, the critic's too.

        Raises:
            ConfigError: if the batch lacks what the algorithm needs; before anything is changed.
        """
        ...

    def publish(self) -> int:
        """Make the sampler use the current weights; returns the new version.

        Raises:
            WeightSyncError: if they did not arrive.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the model as an ordinary Hugging Face folder, and beside it what `load` needs to go on exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        ...

    def close(self) -> None:
        """Stop sampling and free the weights. Repeatable."""
        ...
