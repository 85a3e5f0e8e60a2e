"""The policy as it was published last, in this process, and what samples from it: the embedded engine, or a server.

The weights of verl's workers come here by name, tensor by tensor. An embedded engine decodes with this very model; a vLLM
server is given its weights, and has to prove that it has them, by the same code as on the local backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllm.backends.sampler import EmbeddedSampler, Sampler
from rllm.backends.server_launch import check_serving, open_server
from rllm.errors import WeightSyncError
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.loading import load_model, save_model
from rllm.parser.tool_prompt import TemplateChoice


def check_sampler(config: Any) -> None:
    """
    Raises:
        ConfigError: if a setting of the sampler cannot be used, or would have no effect.
        MissingDependencyError: if there is no vLLM to start.
    """
    check_serving(_of_whole_weights(config))


class PublishedPolicy:
    """A model that takes weights by name, and a sampler of it."""

    def __init__(self, config: Any, *, dtype: str, device: str) -> None:
        """The model of a `TrainConfig`, on a torch device or on `auto`, the best there is; and its sampler, ready.

        Raises:
            ConfigError: if it cannot be loaded, or sampled from.
            InferenceError: if a server does not start.
        """
        with ExitStack() as stack:
            served = open_server(_of_whole_weights(config)) if config.model.engine == "vllm" else None
            if served is not None:
                stack.callback(served.close)
            loaded = load_model(config.model.path, dtype=dtype, device=device, template=TemplateChoice.of(config.model))
            self._model = loaded.model.requires_grad_(False)
            if served is not None:
                self._sampler: Sampler = served.sampler(loaded, None)
            else:
                self._sampler = EmbeddedSampler(
                    loaded,
                    max_concurrent=config.rollout.max_concurrent,
                    max_length=config.model.max_length,
                    tool_parser=config.model.tool_parser,
                    seed=config.seed,
                    autocast=config.optim.autocast,
                )
            stack.callback(self._sampler.close)
            self._sampler.sync_weights(0)
            stack.pop_all()

    @property
    def engine(self) -> InferenceEngine:
        """Samples from the weights that were published last."""
        return self._sampler.inference

    def rest(self) -> None:
        """Leave the memory of the device that both may use to whoever trains, until the next weights come."""
        with self._sampler.paused():
            pass

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on.

        Args:
            weights: all of them, by their Hugging Face names.
            version: what their answers are marked with.

        Raises:
            WeightSyncError: if they did not arrive, all of them.
        """
        with self._sampler.paused():
            self._take(weights)
            self._sampler.sync_weights(version)

    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._model.state_dict()
        awaited = set(own) - _tied(self._model)
        with torch.no_grad():
            for name, weight in weights:
                if name not in own or own[name].shape != weight.shape:
                    raise WeightSyncError(
                        f"verl's workers sent {name} {tuple(weight.shape)}, and the policy has no such weight"
                    )
                own[name].copy_(weight)
                awaited.discard(name)
        if awaited:
            raise WeightSyncError(f"verl's workers did not send {min(awaited)}, so the sampler has some old weights")

    def save(self, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Write a model of these weights as an ordinary Hugging Face folder; its tokenizer is left to others."""
        state = {name: weight for name, weight in weights if name not in _tied(self._model)}
        save_model(self._model, folder, state_dict=state)

    def close(self) -> None:
        """Stop sampling. Repeatable."""
        self._sampler.close()


def _of_whole_weights(config: Any) -> Any:
    """The configuration of a server that knows nothing of adapters: their weights come added to the others."""
    return config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 0})})


def _tied(model: Any) -> set[str]:
    """Weights that are others under a second name."""
    return set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
