"""Main memory and disk of a run: predictions from the model's files, and the tokens of a pass that fit on a CPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from rllm._runtime.process import total_memory
from rllm.backends.verl.settings import needs_critic, needs_reference, on_cpu, weights_dtype
from rllm.config.model_sizes import ADAMW, FLOAT32, GB, num_weights, size_of, trained_bytes
from rllm.config.schema import TrainConfig
from rllm.inference.local.loading import choose_device, choose_dtype
from rllm.trainer.checkpoint import Checkpoints

logger = logging.getLogger(__name__)


def checkpoint_bytes(config: TrainConfig) -> int | None:
    """Return the bytes of future checkpoints: sampled model and state of the workers.

    Returns `None` if the model's files are not here, or if only a small adapter is kept.
    """
    number = _weights_of(config)
    if number is None or config.model.lora_rank:
        return None
    models = 2 if needs_critic(config) else 1
    each = number * (_bytes_each(config) + models * (FLOAT32 + ADAMW))
    most = config.keep_checkpoints + (config.keep_best is not None) + 1  # a new one is whole before the oldest goes
    return each * max(most - _num_written(config), 1)


def _num_written(config: TrainConfig) -> int:
    return 0 if config.run_dir is None else len(Checkpoints(config.run_dir, keep=config.keep_checkpoints).all())


def training_memory(config: TrainConfig) -> list[str]:
    """Return a line on the memory that training in this process takes; none for other backends and unknown models."""
    number = size_of(config.model.path)
    if config.backend != "local" or number is None:
        return []
    device = choose_device(config.model.device)
    itemsize = choose_dtype(config.model.dtype, device).itemsize
    trained = trained_bytes(number, itemsize=itemsize, lora=bool(config.model.lora_rank), offload=config.optim.offload)
    parts = {**trained}
    if needs_reference(config) and not (config.model.lora_rank or config.model.reference_offload):
        parts["reference"] = number * itemsize
    if needs_critic(config):
        parts["critic"] = sum(trained.values())
    if (each := bytes_of_token(config)) is not None:
        parts[f"activations of {config.optim.micro_batch_tokens} tokens"] = config.optim.micro_batch_tokens * each
    sampler = "" if config.model.engine == "vllm" else ", beside the sampler's cache"
    return [f"predicted memory for training on {device.type}: {_summed(parts)}{sampler}"]


def _summed(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{size / GB:.2f} GB {name}" for name, size in parts.items())
    return f"{sum(parts.values()) / GB:.2f} GB ({listed})"


def worker_memory(config: TrainConfig) -> list[str]:
    """Describe the memory that each of verl's workers needs."""
    if config.backend != "verl":
        return []
    number = _weights_of(config)
    if number is None:
        return [f"memory: not predicted, because model.path={config.model.path!r} is no folder with safetensors here"]
    workers = config.verl.num_nodes * config.verl.workers_per_node
    offloaded = ADAMW if config.optim.offload else 0
    trained = FLOAT32 if config.model.lora_rank else 2 * FLOAT32 + ADAMW - offloaded
    parts = {"policy, gradients and optimiser": number * trained / workers}
    if needs_reference(config) and not config.model.reference_offload:
        parts["reference"] = number * FLOAT32 / workers
    if needs_critic(config):
        parts["critic"] = number * (2 * FLOAT32 + ADAMW - offloaded) / workers
    if vocabulary := _vocabulary(config):
        parts[f"logits of {config.optim.micro_batch_tokens} tokens"] = (
            2 * FLOAT32 * config.optim.micro_batch_tokens * vocabulary
        )
    kind = "process" if on_cpu(config) else "GPU"
    return [f"predicted memory of each {kind}: {_summed(parts)}, and activations"]


def _weights_of(config: TrainConfig) -> int | None:
    return num_weights(Path(config.model.path).expanduser())


def _bytes_each(config: TrainConfig) -> int:
    return FLOAT32 if weights_dtype(config) == "float32" else FLOAT32 // 2


def _vocabulary(config: TrainConfig) -> int | None:
    described = Path(config.model.path).expanduser() / "config.json"
    if not described.is_file():
        return None
    size = json.loads(described.read_text()).get("vocab_size")
    return size if isinstance(size, int) else None


OF_HIDDEN, OF_INTERMEDIATE = 16, 5
"""Numbers that each layer keeps of a token until its backward pass: multiples of the hidden and the intermediate size.

Qwen3 models of 5, 20 and 79 million weights were measured to keep 157, 410 and 994 kB a token in float32; this formula
gives 147, 426 and 1,081.
"""
PARTS = 4
"""One part in so many of main memory is for activations: weights, optimiser, sampler and rollouts need theirs."""
LEAST = 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")
"""As `config.json` has them."""


def fitted_to_memory(config: TrainConfig, memory: int | None = None) -> TrainConfig:
    """Return the configuration with `optim.micro_batch_tokens` bounded by main memory, unless it was set.

    The bound depends on the model and on the machine's total memory, not on what is free, so that a resumed run has the
    same. A GPU, or a model whose `config.json` is not on this machine, changes nothing.
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
    """Return the bytes that a forward pass keeps of each token for the backward pass; `None` without `config.json`."""
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
