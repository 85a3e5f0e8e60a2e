"""Settings of a run before it starts: its algorithm, checks of what does not fit together, and the memory it takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rllm._runtime.process import total_memory
from rllm.algorithms.base import Algorithm
from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.backends.verl.settings import needs_critic, needs_reference
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.config.sizes import GB, kept_bytes, pass_tokens, size_of, trained_bytes
from rllm.errors import ConfigError
from rllm.inference.local.loading import check_length, choose_device, choose_dtype, described

logger = logging.getLogger(__name__)


def check_model(config: TrainConfig) -> None:
    """Raise `ConfigError` unless a model is named; and if it is a folder, has the context that is asked for."""
    if not config.model.path:
        raise ConfigError("model.path is not set: name a model folder or hub id, such as model.path=Qwen/Qwen3-0.6B")
    if config.model.max_length is not None and (about := described(config.model.path)) is not None:
        check_length(about, config.model.max_length)


def check_evaluations(config: TrainConfig, *, has_val_data: bool) -> None:
    """Raise `ConfigError` for settings of evaluations without held-out tasks, except the one that disables them."""
    metric = config.keep_best
    if metric is not None and not (metric.removeprefix("-").startswith("eval/") and has_val_data):
        raise ConfigError(
            f"keep_best={metric!r}: use a metric of evaluations, such as eval/accuracy, and give held-out tasks "
            "(val_dataset)"
        )
    if not has_val_data:
        often = ["every"] if config.eval.every else []
        why = "without held-out tasks; give some (val_dataset, or rllm train --val), or leave it out"
        refuse_changes(config.eval, "eval", [*often, "num_rollouts", "temperature", "top_p", "top_k"], why)


def make_algorithm(config: TrainConfig) -> Algorithm:
    """Return the run's algorithm; raise `ConfigError` if it or one of its settings is unknown or does not fit."""
    algorithm = algorithm_of(config)
    if config.rollout.group_size < algorithm.min_group_size:
        raise ConfigError(
            f"rollout.group_size={config.rollout.group_size}: {name_of(config.algorithm)} compares rollouts of one "
            f"task; use {algorithm.min_group_size} or more"
        )
    return algorithm


def check_roles(config: TrainConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` for settings of roles that have no effect with the algorithm."""
    for name, role in config.roles.items():
        key = f"roles.{name}"
        if not role.trainable:
            refuse_changes(role, key, ("weight",), "on trajectories that are not trained on; leave out one of the two")
        if algorithm.credits_tokens and role.weight != 1.0:
            raise ConfigError(
                f"{key}.weight: {type(algorithm).__name__} credits single tokens of all roles together: leave it out, "
                "or use an algorithm that compares rollouts, such as grpo"
            )


_OF_ROLLOUTS = (
    *("rollout.temperature", "rollout.max_tokens", "rollout.max_steps"),
    *("rollout.resample_rounds", "rollout.max_staleness"),
    *("eval.num_rollouts", "eval.temperature", "eval.top_p", "eval.top_k", "gateway.host", "gateway.port"),
    *("filters.ended_by", "filters.truncated", "model.reference_offload", "model.engine"),
)
_OF_DEMONSTRATIONS = ("sft.train_on", "sft.tokenize_method", "sft.reward_threshold", "sft.best_per_task")


def check_fit(config: TrainConfig, *, demonstrates: bool) -> None:
    """Raise `ConfigError` for an algorithm, or settings, that do not fit the source of the episodes."""
    name, algorithm = name_of(config.algorithm), kind_of(config.algorithm)
    if algorithm.demonstrated and not demonstrates:
        raise ConfigError(
            f"algorithm.name={name} learns from demonstrations, not from rollouts: use AgentSFTTrainer or "
            "`rllm sft`, or an algorithm such as grpo"
        )
    if demonstrates and not algorithm.demonstrated:
        raise ConfigError(
            f"algorithm.name={name} learns from rollouts, not from demonstrations: leave it out, or use sft"
        )
    if demonstrates:
        _refuse(config, _OF_ROLLOUTS, "on demonstrations, which are not sampled")
        if config.rollout.group_size != 1:
            raise ConfigError(
                f"rollout.group_size={config.rollout.group_size}: each demonstration is used once a step; leave it out"
            )
    else:
        _refuse(config, _OF_DEMONSTRATIONS, "because there are no demonstrations")
        if config.rollout.resample_rounds and config.rollout.group_size == 1 and not algorithm.needs_greedy:
            raise ConfigError(
                f"rollout.resample_rounds={config.rollout.resample_rounds}: a single rollout of a task "
                "(rollout.group_size=1) never differs from others, so every task would be dropped; use a group_size "
                "of at least 2, or leave it out"
            )
    if not algorithm.needs_rewards:
        _refuse(config, ("rollout.resample_rounds",), f"because {name} does not compare rewards")


def _refuse(config: TrainConfig, keys: Sequence[str], why: str) -> None:
    """Raise `ConfigError` for the first of these settings that was changed, since it would have no effect."""
    for key in keys:
        section, _, name = key.partition(".")
        refuse_changes(getattr(config, section), section, [name], f"{why}; leave it out")


_PARTS = 4
"""One part in so many of main memory is for activations: weights, optimiser, sampler and rollouts need theirs."""
_LEAST = 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")
"""As `config.json` has them."""


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
        tokens = config.optim.micro_batch_tokens
        if device.type == "cpu" and (most := _bytes_of_token(config, recompute=False)) is not None:
            tokens = min(tokens, pass_tokens(int(trained["weights"]), most))
        parts[f"activations of {tokens} tokens"] = tokens * each
    sampler = "" if config.model.engine == "vllm" else ", beside the sampler's cache"
    listed = ", ".join(f"{size / GB:.2f} GB {name}" for name, size in parts.items())
    return [f"predicted memory for training on {device.type}: {sum(parts.values()) / GB:.2f} GB ({listed}){sampler}"]


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
    room = (total_memory() if memory is None else memory) // _PARTS // each
    most = config.optim.micro_batch_tokens
    if room >= most:
        return config
    tokens = max(_LEAST, room // _LEAST * _LEAST)
    logger.info(
        "optim.micro_batch_tokens is %d: %d tokens in a pass would take %.1f GB", tokens, most, most * each / 1e9
    )
    return config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batch_tokens": tokens})})


def bytes_of_token(config: TrainConfig) -> int | None:
    """Return the bytes that a forward pass keeps of each token for the backward pass; `None` without `config.json`."""
    return _bytes_of_token(config, recompute=config.model.gradient_checkpointing)


def _bytes_of_token(config: TrainConfig, *, recompute: bool) -> int | None:
    described = Path(config.model.path).expanduser() / "config.json"
    try:
        about = json.loads(described.read_text(encoding="utf-8"))
        layers, hidden, inner = (int(about[name]) for name in _SIZES)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    size: int = choose_dtype(config.model.dtype, choose_device(config.model.device)).itemsize
    return kept_bytes(layers, hidden, inner, itemsize=size, recompute=recompute)
