"""A teacher in this process: a model that is not trained, asked how likely it finds the policy's tokens."""

from __future__ import annotations

from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.backends.local.head import body_of
from rllm.backends.local.policy import Policy
from rllm.backends.local.trunk import Trunk
from rllm.inference.local.decoder import check_causal
from rllm.inference.local.loading import LoadedModel


class LocalTeacher:
    """Scores at the temperature that the tokens were sampled with, as the policy does."""

    def __init__(self, loaded: LoadedModel, *, micro_batch_tokens: int = 16384) -> None:
        """
        Raises:
            ConfigError: if it is no causal model, or it is not known how it makes its logits.
        """
        model = loaded.model.requires_grad_(False)
        check_causal(model)
        self._policy = Policy.of(model, Trunk.of(body_of(model)))
        self._max_tokens = micro_batch_tokens

    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities of the batch's tokens."""
        return self._policy.score(batch, self._max_tokens)
