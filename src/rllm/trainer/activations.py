"""How many tokens a forward and backward pass takes at once on a CPU, where a process that takes too much memory is killed without a word."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rllm._runtime.process import total_memory
from rllm.config.schema import TrainConfig
from rllm.inference.local.loading import choose_device, choose_dtype

logger = logging.getLogger(__name__)

OF_HIDDEN, OF_INTERMEDIATE = 16, 5
"""How many numbers each layer keeps of a token until its backward pass: so many times the hidden size, and so many times the
intermediate size. Qwen3 models of 5, 20 and 79 million weights were measured to keep 157, 410 and 994 kB a token in float32;
by this they keep 147, 426 and 1,081."""
PARTS = 4
"""One part in so many of main memory is for activations: weights, optimiser, sampler and rollouts need theirs."""
LEAST = 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")
"""As `config.json` has them."""


def fitted_to_memory(config: TrainConfig, memory: int | None = None) -> TrainConfig:
    """Return the configuration with `optim.micro_batch_tokens` bounded by main memory, unless it was set.

    The bound depends on the model and on the machine's total memory, not on what is free, so that a resumed run has the same.
    A GPU, or a model whose `config.json` is not on this machine, changes nothing.
    """
    device = choose_device(config.model.device)
    if "micro_batch_tokens" in config.optim.model_fields_set or config.backend != "local" or device.type != "cpu":
        return config
    each = bytes_of_token(config)
    if each is None:
        return config
    room = (total_memory() if memory is None else memory) // PARTS // each
    most = config.optim.micro_batch_tokens
    if room >= most:
        return config
    tokens = max(LEAST, room // LEAST * LEAST)
    logger.info(
        "optim.micro_batch_tokens is %d: %d tokens in a pass would take %.1f GB", tokens, most, most * each / 1e9
    )
    return config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batch_tokens": tokens})})


def bytes_of_token(config: TrainConfig) -> int | None:
    """What a forward pass keeps of each token until the backward pass; `None` where the model is not described here."""
    described = Path(config.model.path).expanduser() / "config.json"
    try:
        about = json.loads(described.read_text(encoding="utf-8"))
        layers, hidden, inner = (int(about[name]) for name in _SIZES)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    of_layer = OF_HIDDEN * hidden + OF_INTERMEDIATE * inner
    kept = layers * hidden + of_layer if config.model.gradient_checkpointing else layers * of_layer
    size: int = choose_dtype(config.model.dtype, choose_device(config.model.device)).itemsize
    return size * kept
