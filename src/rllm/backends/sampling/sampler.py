"""Where the policy is sampled from: in this process, on the trainer's own tensors or a copy of them; or on a server."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rllm.backends.sampling.copy_of_policy import copy_trained, sampling_copy
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import LoadedModel


class Sampler(Protocol):
    """What a trainer needs of it. All methods block."""

    @property
    def inference(self) -> InferenceEngine:
        """Samples from the weights that were handed over last."""
        ...

    @property
    def weight_version(self) -> int:
        """Of these weights."""
        ...

    def still(self) -> AbstractContextManager[object]:
        """Inside, the trainer may change its weights, and has the memory of the device that both may use."""
        ...

    def hand_over(self, version: int) -> None:
        """Sample from the trainer's weights as they are from now on.

        Raises:
            WeightSyncError: if they did not arrive.
        """
        ...

    def close(self) -> None:
        """Stop sampling. Repeatable."""
        ...


class EmbeddedSampler:
    """Decodes in this process. It shares the trainer's tensors, so it is still while they change; with `overlap` it has a
    copy of what is trained, and goes on meanwhile."""

    def __init__(self, loaded: LoadedModel, *, overlap: bool = False, **options: Any) -> None:
        """`options` are those of `LocalEngine`."""
        self._trained = loaded.model
        self._sampled = sampling_copy(loaded.model) if overlap else loaded.model
        self.inference = LocalEngine(self._sampled, loaded.tokenizer, device=loaded.device, **options)

    @property
    def weight_version(self) -> int:
        return self.inference.weight_version

    def still(self) -> AbstractContextManager[object]:
        return self.inference.paused() if self._sampled is self._trained else nullcontext()

    def hand_over(self, version: int) -> None:
        with self.inference.paused():
            if self._sampled is not self._trained:
                copy_trained(self._trained, self._sampled)
            self.inference.publish(version)

    def close(self) -> None:
        self.inference.close()
