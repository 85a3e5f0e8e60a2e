"""Sampler of a policy in training: the protocol, and the one in this process (`server_sampler.py` has the other)."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rllm.inference.engine import InferenceEngine
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sampler(Protocol):
    """Sampler of the policy. All methods block."""

    @property
    def inference(self) -> InferenceEngine:
        """Engine that samples from the weights of the last sync."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of these weights."""
        ...

    def paused(self) -> AbstractContextManager[object]:
        """Let the trainer change its weights inside the block, and use all memory of a shared device."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample from the trainer's current weights from now on.

        Raises:
            WeightSyncError: if they did not arrive.
        """
        ...

    def close(self) -> None:
        """Stop sampling. Repeatable."""
        ...


class EmbeddedSampler:
    """Sampler in this process.

    It shares the trainer's tensors, so it is paused while they change; with `overlap` it has a copy of the trained
    ones and keeps sampling.
    """

    def __init__(self, loaded: LoadedModel, *, overlap: bool = False, **options: Any) -> None:
        """Make the engine; `options` are those of `LocalEngine`."""
        self._trained = loaded.model
        self._sampled = sampling_copy(loaded.model) if overlap else loaded.model
        self.inference = LocalEngine(self._sampled, loaded.tokenizer, device=loaded.device, **options)

    @property
    def weight_version(self) -> int:
        return self.inference.weight_version

    def paused(self) -> AbstractContextManager[object]:
        return self.inference.paused() if self._sampled is self._trained else nullcontext()

    def sync_weights(self, version: int) -> None:
        with self.inference.paused():
            if self._sampled is not self._trained:
                copy_trained(self._trained, self._sampled)
            self.inference.publish(version)

    def close(self) -> None:
        self.inference.close()


def sampling_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with its own copy of the trained weights, which shares the frozen ones."""
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, memo=frozen).requires_grad_(False)


def copy_trained(model: PreTrainedModel, to: PreTrainedModel) -> None:
    """Copy the trained weights into a `sampling_copy`."""
    with torch.no_grad():
        for weight, copied in zip(model.parameters(), to.parameters(), strict=True):
            if weight.requires_grad:
                copied.copy_(weight)
