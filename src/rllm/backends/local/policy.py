"""A causal language model, seen as the log-probabilities of a batch's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.backends.local.head import Head
from rllm.backends.local.token_logprobs import logprobs_and_entropy
from rllm.backends.local.trunk import Trunk, in_parts
from rllm.inference.local.wide_linear import use_wide_products


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model with its head."""

    model: Any
    trunk: Trunk
    """The model without its head (`body_of`), and how it is run."""
    head: Head

    @classmethod
    def of(cls, model: Any, trunk: Trunk) -> Self:
        """
        Raises:
            ConfigError: if it is not known how the model makes its logits.
        """
        use_wide_products(model)
        return cls(model=model, trunk=trunk, head=Head.of(model))

    def logprobs(self, batch: Batch, *, entropy: bool = True, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] of the batch's tokens, and the entropies [N] of what they were drawn from."""
        with self.trunk.arithmetic():
            states, state_of = self.trunk.before_tokens(batch)
            return logprobs_and_entropy(
                states,
                self.head,
                batch.ids.to(self.trunk.device),
                state_of=state_of,
                temperature=batch.temperature,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
            )

    def score(self, batch: Batch, max_tokens: int) -> Tensor:
        """[N] log-probabilities without gradient, computed for at most about `max_tokens` at a time."""
        return in_parts(batch, max_tokens, lambda part: self.logprobs(part, entropy=False)[0])
