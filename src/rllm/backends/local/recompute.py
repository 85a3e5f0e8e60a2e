"""Gradient checkpointing: layers that keep only their inputs, and are run again in the backward pass.

`transformers` has its own, which takes the cache away from the layers; here the cache carries the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rllm.errors import ConfigError, first_line


def recomputable_layers(model: Module) -> list[Module]:
    """The layers that `transformers` marks as such.

    Raises:
        ConfigError: if the model has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing=True: {type(model).__name__} has no layers that can be run again; use false"
        )
    return layers


@contextmanager
def recomputing(layers: Sequence[Module]) -> Iterator[None]:
    """Forward passes inside keep the inputs of these layers only. Without dropout, as here, the second run is the first."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def check_recomputing(model: Module) -> None:
    """Try it.

    Raises:
        ConfigError: if the model has no such layers, or one that its first run has changed something for, as DeepSeek V4's, which
            always have a cache.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    weights = [weight for weight in trained if weight.dim() < 2] or trained  # the small ones are in all layers
    with recomputing(recomputable_layers(model)):
        ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        try:
            torch.autograd.grad(states.sum(), weights, allow_unused=True)
        except RuntimeError as error:
            raise ConfigError(
                f"model.gradient_checkpointing=True: the layers of {type(model).__name__} cannot be run again; use false "
                f"({first_line(error)})"
            ) from error
