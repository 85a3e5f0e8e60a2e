"""Settings of a run before it starts: its algorithm, checks of what does not fit together, and the memory it takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm._runtime.process import total_memory
from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import MOST_REPEATED
from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.backends.local.logprobs import CHUNK_ELEMENTS
from rllm.backends.verl.settings import needs_critic, needs_reference
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.config.sizes import (
    BYTES_QUANTIZED,
    FLOAT32,
    GB,
    ModelShape,
    local_folder,
    num_episodes,
    size_of,
    trained_bytes,
)
from rllm.errors import ConfigError
from rllm.inference.local.loading import check_length, choose_device, choose_dtype, described
from rllm.inference.local.packed import SHARE_OF_MEMORY
from rllm.inference.model_folder import config_in
from rllm.types import JSONObject

logger = logging.getLogger(__name__)


def check_model(config: TrainConfig) -> None:
    """Raise `ConfigError` if no model is named, or if its context is shorter than `model.max_length`."""
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
        why = "without held-out tasks; give some (val_dataset), or leave it out"
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
    *("data.", "filters.", "model.reference_offload", "model.engine"),
)
"""Settings, and whole sections (`data.`), that have no effect on demonstrations."""


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
        _refuse(config, ("sft.",), "because there are no demonstrations")
        if config.rollout.resample_rounds and config.rollout.group_size == 1 and not algorithm.needs_greedy:
            raise ConfigError(
                f"rollout.resample_rounds={config.rollout.resample_rounds}: a single rollout of a task "
                "(rollout.group_size=1) never differs from others, so every task would be dropped; use "
                "rollout.group_size=2 or more, or leave it out"
            )
    if not config.data.replay:
        _refuse(config, ("data.replay_steps",), "without data.replay")
    elif algorithm.needs_greedy:
        _refuse(config, ("data.replay",), f"on the greedy rollouts that {name} compares with, which are not kept")
    if not algorithm.needs_rewards:
        _refuse(config, ("rollout.resample_rounds",), f"because {name} does not compare rewards")


def _refuse(config: TrainConfig, keys: Sequence[str], why: str) -> None:
    """Raise `ConfigError` for the first of these settings that was changed, since it would have no effect."""
    for key in keys:
        name, _, field = key.partition(".")
        section = getattr(config, name)
        refuse_changes(section, name, [field] if field else type(section).model_fields, f"{why}; leave it out")


_PARTS = 4
"""A fourth of main memory is for activations; the rest is for weights, optimizer, sampler and rollouts."""
_LEAST = 1024
_PROCESS = 0.5 * GB
"""Python and torch, in main memory."""
_SPREAD = 2.0
"""Factor on the counted bytes of packed weights, since glibc before version 2.38 seldom reuses gaps."""
_SPREAD_OF_PASS = 1.5
"""The same factor for activations."""
_SPARE = 1.125
"""Factor for the spare columns of the sampler's cache."""
_PROMPT, _ANSWER = 64, 256
"""Assumed tokens of a prompt if there are no tasks, and of an answer if rollout.max_tokens is not set."""
_TEMPLATE, _CHARACTERS = 24, 4
"""Approximate tokens that a chat template adds to a prompt, and characters of a token."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Bytes that a run takes on its device, by purpose."""

    device: str
    held: Mapping[str, float]
    """Held all the time."""
    updating: Mapping[str, float]
    """Held in addition during updates."""
    sampling: Mapping[str, float]

    @property
    def largest(self) -> Mapping[str, float]:
        """All parts, in the phase that takes more."""
        phases = sorted((self.updating, self.sampling), key=lambda parts: sum(parts.values()))
        return {**self.held, **phases[-1]}

    @property
    def peak(self) -> float:
        return sum(self.largest.values())


def prompt_tokens(tasks: Sequence[Mapping[str, object]]) -> int:
    """Return the approximate number of tokens of a long prompt, from the longest text in any of the tasks."""
    texts = (value for task in tasks for value in task.values() if isinstance(value, str))
    longest = max(map(len, texts), default=None)
    return _PROMPT if longest is None else _TEMPLATE + longest // _CHARACTERS


def predicted_memory(config: TrainConfig, prompt: int = _PROMPT) -> PredictedMemory | None:
    """Return the memory that training in this process takes; `None` for other backends and unknown models.

    `prompt` is the number of tokens of a prompt.
    """
    number = size_of(config.model.path)
    if config.backend != "local" or number is None:
        return None
    device, shape = choose_device(config.model.device), _shape_of(config)
    itemsize = choose_dtype(config.model.dtype, device).itemsize
    on_cpu = device.type == "cpu"
    held = _trained(config, number, shape, itemsize)
    if needs_critic(config):
        held["critic"] = sum(held.values())
    updating = {"gradients": held.pop("gradients")} if "gradients" in held else {}
    if needs_reference(config) and not (config.model.lora_rank or (config.model.reference_offload and not on_cpu)):
        held["reference"] = number * itemsize
    if on_cpu:
        held["Python and torch"] = _PROCESS
    if shape is not None:
        aim = shape.pass_tokens(int(held["weights"]), itemsize) if on_cpu else None
        tokens = _tokens_of_pass(config, prompt, aim)
        is_long = tokens > config.optim.micro_batch_tokens
        each = shape.kept_bytes(itemsize=itemsize, recompute=config.model.gradient_checkpointing or is_long)
        logits = min(tokens * shape.vocabulary, CHUNK_ELEMENTS) * 2 * itemsize
        updating[f"activations of {tokens:,} tokens"] = tokens * each * _SPREAD_OF_PASS + logits
    samples_here = on_cpu and config.model.engine == "embedded"
    sampling = _sampler(config, number, shape, itemsize, prompt) if samples_here else {}
    return PredictedMemory(device=device.type, held=held, updating=updating, sampling=sampling)


def _tokens_of_pass(config: TrainConfig, prompt: int, aim: int | None) -> int:
    """Return the tokens of an update's largest pass, see `Batch.split`."""
    answer, most = config.rollout.max_tokens or _ANSWER, config.optim.micro_batch_tokens
    sequence = prompt + answer
    if aim is None:
        return max(sequence, most)
    group = prompt + config.rollout.group_size * answer
    return max(sequence, min(most, max(aim, min(int(prompt / MOST_REPEATED), group))))


def _trained(config: TrainConfig, number: float, shape: ModelShape | None, itemsize: int) -> dict[str, float]:
    """Return the bytes of weights, gradients and AdamW, with an adapter if there is one."""
    rank, ends = config.model.lora_rank, 0 if shape is None else shape.vocabulary * shape.hidden
    trained = trained_bytes(
        number,
        itemsize=itemsize,
        lora=bool(rank),
        offload=config.optim.offload,
        in_8_bits=config.optim.name == "adamw8bit",
        of_embeddings=ends,
    )
    if rank and config.model.quantize is not None:
        trained["weights"] = ends * itemsize + max(number - ends, 0) * BYTES_QUANTIZED[config.model.quantize]
    if rank and shape is not None:
        trained["adapter"] = sum(trained_bytes(shape.adapter_weights(rank), itemsize=FLOAT32).values())
    return trained


def _sampler(
    config: TrainConfig, number: float, shape: ModelShape | None, itemsize: int, prompt: int
) -> dict[str, float]:
    """Return the bytes that the embedded sampler takes on a CPU until the next update."""
    parts: dict[str, float] = {}
    if itemsize == FLOAT32 and number * FLOAT32 * SHARE_OF_MEMORY <= total_memory():
        parts["packed weights"] = number * FLOAT32 * _SPREAD
    if shape is not None:
        count = min(config.rollout.max_concurrent, num_episodes(config))
        answer = config.rollout.max_tokens or _ANSWER
        length = prompt + answer
        # Finished answers are kept for later turns, and each prompt once.
        kept = count * answer + -(-count // config.rollout.group_size) * prompt
        cached = (count * length * _SPARE + kept) * shape.layers * shape.cached * itemsize
        parts[f"keys and values of {count} sequences of {length:,} tokens"] = min(cached, total_memory() / 4)
    return parts


def training_memory(config: TrainConfig, prompt: int = _PROMPT) -> list[str]:
    """Return lines on the memory that training in this process takes; none for other backends and unknown models."""
    found = predicted_memory(config, prompt)
    if found is None:
        return []
    listed = ", ".join(f"{size / GB:.2f} GB {name}" for name, size in found.largest.items())
    beside = "" if found.device == "cpu" or config.model.engine == "vllm" else ", in addition to the sampler's cache"
    lines = [f"predicted peak of memory for training on {found.device}: {found.peak / GB:.2f} GB ({listed}){beside}"]
    if (saving := best_saving(config, prompt)) is not None:
        lines.append(f"what saves most: {saving}")
    return lines


def best_saving(config: TrainConfig, prompt: int = _PROMPT) -> str | None:
    """Return the setting that lowers the predicted peak most, and that peak; `None` if none lowers it by a tenth."""
    now = predicted_memory(config, prompt)
    if now is None:
        return None
    fewer = max(config.rollout.max_concurrent // 4, 1)
    changes: dict[str, tuple[str, JSONObject]] = {
        "model.gradient_checkpointing=true": ("model", {"gradient_checkpointing": True}),
        "optim.name=adamw8bit": ("optim", {"name": "adamw8bit"}),
        f"rollout.max_concurrent={fewer}": ("rollout", {"max_concurrent": fewer}),
    }
    if config.model.lora_rank:
        changes["model.quantize=nf4"] = ("model", {"quantize": "nf4"})
    else:
        changes["model.lora_rank=16"] = ("model", {"lora_rank": 16})
    peaks: dict[str, float] = {}
    for name, (section, change) in changes.items():
        changed = config.model_copy(update={section: getattr(config, section).model_copy(update=change)})
        if (then := predicted_memory(changed, prompt)) is not None:
            peaks[name] = then.peak
    name, peak = min(peaks.items(), key=lambda item: item[1])
    return f"{name} ({peak / GB:.2f} GB)" if peak < 0.9 * now.peak else None


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
    shape = _shape_of(config)
    if shape is None:
        return None
    itemsize: int = choose_dtype(config.model.dtype, choose_device(config.model.device)).itemsize
    return shape.kept_bytes(itemsize=itemsize, recompute=config.model.gradient_checkpointing)


def _shape_of(config: TrainConfig) -> ModelShape | None:
    about = config_in(local_folder(config.model.path))
    return ModelShape.of(about.get("text_config") or about)
