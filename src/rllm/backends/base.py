"""Protocol of a training backend: hold the weights, sample from them, update them, and save them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self, TypeAlias

from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError, WeightSyncError
from rllm.inference.engine import InferenceEngine

BACKENDS: Mapping[str, str] = {
    "local": "rllm.backends.local.backend:LocalBackend",
    "verl": "rllm.backends.verl.backend:VerlBackend",
}
"""Short names for `backend`."""

Role: TypeAlias = Literal["policy", "critic"]
"""Model that an optimizer step is for."""


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Division of a batch into optimizer steps."""

    num_forward_tokens: int
    """Tokens that one forward pass over the batch computes."""
    num_minibatches: int = 1
    num_epochs: int = 1
    policy_waits: bool = False
    """Only the critic is updated (`critic.warmup_steps`)."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step on [M] tokens."""

    sums: Counter[str]
    """Sums over tokens by metric name; `loss` is the loss of the step."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    logprobs: Tensor | None = None
    """[M] the policy's log-probabilities before the step; `None` for a critic."""
    entropies: Tensor | None = None
    """[M] entropy of the distribution that each token was drawn from, in nats; `None` if not known."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes in this process by part, such as `weights`; empty if not known."""


@dataclass(kw_only=True)
class UpdateResult:
    """All optimizer steps on a batch of N tokens."""

    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = None
    """[N] the trainer's log-probabilities before the update, aligned with the batch."""
    entropies: Tensor | None = None
    """[N] entropies in the first epoch, in nats; `None` if not known."""
    memory: dict[str, int] = field(default_factory=dict)
    """See `StepResult`."""
    ratios: Tensor | None = None
    """[N] probability of each token in the last epoch relative to `logprobs`; all 1 for a single step."""


class TrainingBackend(Protocol):
    """Holder of the weights. All methods block; the training loop calls them from a thread."""

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Check the settings before anything is loaded or written.

        Raises:
            ConfigError: if a setting cannot be used, or would have no effect.
        """
        ...

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        """Load the model and return its backend.

        Raises:
            ConfigError: if a setting cannot be used.
        """
        ...

    @property
    def inference(self) -> InferenceEngine:
        """Sampler of the published weights."""
        ...

    @property
    def weight_version(self) -> int:
        """Number of publishes in this run; each trace records the version that sampled it."""
        ...

    @property
    def learning_rate(self) -> float:
        """The policy's learning rate in its latest step."""
        ...

    def score(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities of the batch's tokens under the current weights, without gradient."""
        ...

    def score_reference(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities under the weights that the run began with.

        Raises:
            ConfigError: if the backend has no reference model.
        """
        ...

    def values(self, batch: Batch) -> Tensor:
        """Return [N] the critic's estimates of the return from each token on.

        Raises:
            ConfigError: if the backend has no critic.
        """
        ...

    def energies(self, batch: Batch) -> Tensor:
        """Return [N] the squared norm of the gradient of each token's log-probability by the logits.

        Raises:
            ConfigError: if the backend cannot compute it.
        """
        ...

    def begin_update(self, batch: Batch) -> UpdatePlan:
        """Prepare for the optimizer steps on a batch that is not empty.

        Until `publish`, no answer may be sampled from changed weights under the old version.
        """
        ...

    def step(self, role: Role, part: Batch, algorithm: Algorithm, *, scale: float) -> StepResult:
        """Take one optimizer step on part of a batch, with the loss times `scale`.

        Dividing the part into micro-batches never changes the result.
        """
        ...

    def publish(self) -> int:
        """Give the sampler the current weights and return their version.

        Raises:
            WeightSyncError: if they did not arrive.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the model as an ordinary Hugging Face folder, with the state that `load` needs to resume exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Resume from a folder that `save` wrote.

        Raises:
            ConfigError: if the folder is incomplete or holds another model.
        """
        ...

    def close(self) -> None:
        """Stop sampling and free the weights. Repeatable."""
        ...


def non_finite_weight(name: str) -> WeightSyncError:
    """Return the error for a weight that an update made infinite or NaN."""
    return WeightSyncError(
        f"the update made {name} infinite or NaN, so it was not published: begin a new run with a lower optim.lr or "
        "optim.max_grad_norm, from the weights of the last checkpoint (model.path)"
    )


@contextmanager
def loading_checkpoint(folder: Path, *unreadable: type[Exception]) -> Iterator[None]:
    """Turn errors of these types inside the block into a `ConfigError` that names the checkpoint."""
    try:
        yield
    except unreadable as error:
        raise ConfigError(
            f"checkpoint={str(folder)!r} cannot be loaded: it is incomplete or of another model "
            f"({type(error).__name__}: {error})"
        ) from error
