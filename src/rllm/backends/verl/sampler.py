"""Where a policy that verl trains is sampled: whatever takes weights by name, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from rllm.errors import WeightSyncError
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import load_model


class Sampler(Protocol):
    """Answers from the published weights, which lie elsewhere than those that are trained."""

    @property
    def engine(self) -> InferenceEngine: ...

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on.

        Args:
            weights: all of them, by their Hugging Face names.
            version: what their answers are marked with.

        Raises:
            WeightSyncError: if they did not arrive, all of them.
        """
        ...

    def close(self) -> None: ...


class EmbeddedSampler:
    """The embedded engine in this process, on a model of its own."""

    def __init__(self, config: Any, *, dtype: str, device: str) -> None:
        """The model of a `TrainConfig`, on a torch device or on `auto`, the best there is.

        Raises:
            ConfigError: if it cannot be loaded.
        """
        loaded = load_model(config.model.path, dtype=dtype, device=device)
        self._model = loaded.model.requires_grad_(False)
        self.engine = LocalEngine(
            self._model,
            loaded.tokenizer,
            max_concurrent=config.rollout.max_concurrent,
            max_length=config.model.max_length,
            tool_parser=config.model.tool_parser,
            seed=config.seed,
            device=loaded.device,
        )

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Sampler`."""
        own = self._model.state_dict()
        awaited = set(own)
        with self.engine.paused(), torch.no_grad():
            for name, weight in weights:
                if name not in own or own[name].shape != weight.shape:
                    raise WeightSyncError(
                        f"verl's workers sent {name} {tuple(weight.shape)}, which the sampler has not"
                    )
                own[name].copy_(weight)
                awaited.discard(name)
            if awaited - _tied(self._model):
                raise WeightSyncError(
                    f"verl's workers did not send {sorted(awaited)[0]}, so the sampler has old weights"
                )
            self.engine.publish(version)

    def close(self) -> None:
        self.engine.close()


def _tied(model: Any) -> set[str]:
    """Weights that are others under a second name."""
    return set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
