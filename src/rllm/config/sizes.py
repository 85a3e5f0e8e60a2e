"""Learning rates and memory by the size of a model, and the sizes of a training step.

The table of rates is also in docs/models-by-size.md; a test compares them.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError, counted

logger = logging.getLogger(__name__)

PAGE = "docs/models-by-size.md"
_FAR = 10.0
"""Factor to the rate of the table beyond which a rate is warned about, upwards or downwards."""
GB = 1e9
FLOAT32, ADAMW = 4, 8
"""Bytes of a float32 weight or gradient, and of AdamW's two running means of it."""
ADAMW_8_BITS = 2.04
"""The same means in 8 bits, with the scales of blocks of 256."""
BYTES_QUANTIZED = {"nf4": 0.5625, "int8": 1.01}
"""Bytes of a quantized weight, with the scales, by `model.quantize`."""
_LEAST_ROOM = 128 << 20
"""Bytes that the activations of a pass may always have: smaller passes take more time."""

_IN_A_NAME = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_UNITS = {"m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class SizeClass:
    """Models of similar size, and the learning rates that suit them."""

    up_to: float
    """Largest number of weights, all experts included."""
    full: float
    """Reinforcement learning of all weights."""
    lora: float
    sft: float
    """Supervised fine-tuning of all weights."""
    sft_lora: float

    def rate(self, *, lora: bool, demonstrates: bool) -> float:
        """Return the learning rate for this kind of training."""
        if demonstrates:
            return self.sft_lora if lora else self.sft
        return self.lora if lora else self.full


TABLE = (
    SizeClass(1e7, 3e-4, 1e-3, 1e-3, 2e-3),
    SizeClass(6e7, 1e-4, 5e-4, 5e-4, 1e-3),
    SizeClass(2.5e8, 2e-5, 2e-4, 1e-4, 5e-4),
    SizeClass(8e8, 5e-6, 5e-5, 2e-5, 2e-4),
    SizeClass(2e9, 2e-6, 2e-5, 2e-5, 2e-4),
    SizeClass(5e9, 1e-6, 1e-5, 1e-5, 1e-4),
    SizeClass(1e10, 1e-6, 1e-5, 1e-5, 1e-4),
)
"""From small to large. Larger models have the rates of the last class."""


def class_of(num_weights: float) -> SizeClass:
    """Return the class of a model with so many weights; the last one for larger models."""
    return next((item for item in TABLE if num_weights <= item.up_to), TABLE[-1])


def num_weights(folder: Path) -> int | None:
    """Return the number of weights of a model, from the headers of its files; `None` if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(_numbers_in(path) for path in files) if files else None


def size_of(model: str) -> float | None:
    """Return the number of weights of a folder or hub id, `None` if unknown.

    It is read from files in the folder or the hub's cache, else from the name (`Qwen3-0.6B`). An adapter has the size
    of its base.
    """
    folder = Path(model).expanduser()
    try:
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            return size_of(str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]))
        number = num_weights(local_folder(model))
    except (OSError, ValueError, KeyError, OverflowError):  # a damaged file, which loading the model reports
        number = None
    if number is not None:
        return number
    stated = _IN_A_NAME.search(folder.name)
    return None if stated is None else int(stated[1] or 1) * float(stated[2]) * _UNITS[stated[3].lower()]


def size_in_words(model: str) -> str:
    """Describe a model's size, such as `135M parameters`, or that it is downloaded first; empty if unknown."""
    if not local_folder(model).is_dir():
        is_hub_id = _HUB_ID.fullmatch(model) and not Path(model).parent.is_dir()
        return "not on this machine yet, so it is downloaded first" if is_hub_id and not is_offline() else ""
    number = size_of(model)
    return "" if number is None else f"{_in_units(number)} parameters"


def _in_units(number: float) -> str:
    """Return a number in three digits and the greatest unit that fits, such as `135M`."""
    units = ("", "K", "M", "B", "T")
    power = min(int(math.log10(max(number, 1)) + 1e-9) // 3, len(units) - 1)
    scaled = number / 1000**power
    return f"{scaled:.3g}{units[power]}" if scaled < 999.5 else f"{scaled:.0f}{units[power]}"


def with_learning_rate(
    config: TrainConfig, *, demonstrates: bool, resumed: float | None = None
) -> tuple[TrainConfig, str | None]:
    """Return the configuration with `optim.lr` set, and the origin of a rate that the user did not set.

    Args:
        config: keeps the rate that it has; else it gets the one that suits the size of the model.
        demonstrates: true for supervised fine-tuning.
        resumed: rate of a resumed run, which stays.
    """
    if config.optim.lr is not None:
        return config, None
    number = size_of(config.model.path)
    size_class = TABLE[-1] if number is None else class_of(number)
    rate = size_class.rate(lora=bool(config.model.lora_rank), demonstrates=demonstrates)
    origin = f"by model size: {_kind(config, demonstrates, number)}"
    if resumed is not None:
        rate, origin = resumed, "as before the resume"
    logger.info("optim.lr=%g, %s (%s)", rate, origin, PAGE)
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": rate})}), origin


def rate_in_words(config: TrainConfig, origin: str | None, *, demonstrates: bool) -> list[str]:
    """Describe a learning rate that was chosen by size, or that differs much from the usual one."""
    lr = config.optim.lr
    assert lr is not None, "with_learning_rate was called"
    if origin is not None:
        return [f"optim.lr={lr:g}, {origin} ({PAGE})"]
    number = size_of(config.model.path)
    if number is None:
        return []
    usual = class_of(number).rate(lora=bool(config.model.lora_rank), demonstrates=demonstrates)
    if max(lr / usual, usual / lr) <= _FAR * (1 + 1e-9):  # tolerates the rounding of a factor of ten
        return []
    far, risk = (
        (f"{_plain(lr / usual)} times", "collapse") if lr > usual else (f"1/{_plain(usual / lr)} of", "learn nothing")
    )
    kind = _kind(config, demonstrates, number)
    return [f"optim.lr={lr:g} is {far} the usual {usual:g} ({kind}): the policy may {risk}; see {PAGE}"]


def trained_bytes(
    num_weights: float,
    *,
    itemsize: int,
    lora: bool = False,
    offload: bool = False,
    in_8_bits: bool = False,
    of_embeddings: float = 0,
) -> dict[str, float]:
    """Return the bytes that a model takes on its device while it is trained in this process, by purpose.

    Weights of 16 bits are updated through a float32 copy, whose gradient sums theirs (`MasterAdamW`). With `offload`
    the copy, its gradient and AdamW's means are in main memory. With `in_8_bits` (adamw8bit), the means of all weights
    but embeddings take two bytes and their scales. An adapter is counted apart.
    """
    weights = num_weights * itemsize
    if lora:
        return {"weights": weights}
    if offload:
        return {"weights": weights, "gradients": weights}
    means = num_weights * ADAMW
    if in_8_bits:
        means = of_embeddings * ADAMW + (num_weights - of_embeddings) * ADAMW_8_BITS
    if itemsize >= FLOAT32:
        return {"weights": weights, "gradients": weights, "AdamW": means}
    copies = num_weights * FLOAT32
    return {"weights": weights, "gradients": weights + copies, "AdamW and float32 copy": copies + means}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder, as its `config.json` has them."""

    layers: int
    hidden: int
    intermediate: int
    attention: int
    """Width of queries, keys and values together."""
    cached: int
    """Numbers that a layer caches of a token: its keys and values."""
    vocabulary: int

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> ModelShape | None:
        """Read a configuration; `None` if it lacks one of the sizes."""
        try:
            hidden, heads = int(about["hidden_size"]), int(about.get("num_attention_heads") or 1)
            width = int(about.get("head_dim") or hidden // heads)
            cached = 2 * width * int(about.get("num_key_value_heads") or heads)
            return cls(
                layers=int(about["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(about["intermediate_size"]),
                attention=heads * width + cached,
                cached=cached,
                vocabulary=int(about.get("vocab_size") or 0),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def kept_bytes(self, *, itemsize: int, recompute: bool) -> int:
        """Return the bytes that a forward pass keeps of each token for the backward pass.

        Counted in Qwen3 of three widths and a Llama, and within a tenth of it. Norms keep float32 in any case.
        """
        of_norms = 3 * self.hidden if itemsize < FLOAT32 else 0
        of_layer = 6 * self.hidden + of_norms + 3 * self.attention + 2 * self.intermediate
        return itemsize * (self.layers * self.hidden * 3 // 2 + of_layer if recompute else self.layers * of_layer)

    def pass_tokens(self, weight_bytes: int, itemsize: int) -> int:
        """Return the tokens of a pass on a CPU, where larger ones save little time and take more memory.

        Their activations, if none is computed again, take about as much memory as the weights. Each pass reads these
        and adds to their gradients, which takes as long as some twenty tokens.
        """
        return max(weight_bytes, _LEAST_ROOM) // self.kept_bytes(itemsize=itemsize, recompute=False)

    def adapter_weights(self, rank: int) -> int:
        """Return about the number of weights of a LoRA adapter on all linear layers of the body."""
        inputs_and_outputs = 5 * self.hidden + 2 * self.attention + 3 * (self.hidden + self.intermediate)
        return rank * self.layers * inputs_and_outputs


def _plain(number: float) -> str:
    """Return a number with three digits and without an exponent: `1,670`."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _kind(config: TrainConfig, demonstrates: bool, number: float | None) -> str:
    trained = "LoRA" if config.model.lora_rank else "all weights"
    training = "supervised fine-tuning" if demonstrates else "reinforcement learning"
    unknown = f"unknown size (model.path={config.model.path!r}), taken as large"
    return f"{training} of {trained}, model of {unknown if number is None else f'{_in_units(number)} weights'}"


def _numbers_in(path: Path) -> int:
    """Return the number of weights in a safetensors file: eight bytes of length, then that many bytes of JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= path.stat().st_size else None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is cut off, or not a file of safetensors")
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids downloads from the hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def local_folder(model: str) -> Path:
    """Return the folder of a model on this machine: the named one, or a hub id's folder in the hub's cache.

    It does not exist if there is neither. The hub's cache may lack files that are downloaded when they are needed.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # the latter for what is not a hub id
        found = None
    return Path(found).parent if isinstance(found, str) else folder


def fitted_to_tasks(config: TrainConfig, num_tasks: int) -> TrainConfig:
    """Return the configuration with `tasks_per_step` and `num_steps` derived from the number of tasks.

    `tasks_per_step` is at most the number of tasks unless it was set; `num_steps` follows from `num_epochs`.
    """
    fitted: dict[str, int] = {}
    tasks_per_step = config.tasks_per_step
    if "tasks_per_step" not in config.model_fields_set:
        fitted["tasks_per_step"] = tasks_per_step = min(tasks_per_step, num_tasks)
    if config.num_epochs is not None:
        fitted["num_steps"] = math.ceil(config.num_epochs * num_tasks / tasks_per_step)
    return config.model_copy(update=fitted)


def check_sizes(config: TrainConfig, num_tasks: int) -> None:
    """Raise `ConfigError` if a step's episodes cannot be divided among its updates; warn of probable mistakes."""
    episodes, parts = num_episodes(config), config.optim.num_minibatches
    if episodes % parts:
        raise ConfigError(
            f"optim.num_minibatches={parts} does not divide the {counted(episodes, 'episode')} of a step, "
            f"tasks_per_step={config.tasks_per_step} x rollout.group_size={config.rollout.group_size}: use "
            f"{_nearest_divisors(episodes, parts)}"
        )
    if config.data.replay and not num_replayed(config):
        raise ConfigError(
            f"data.replay={config.data.replay}: with tasks_per_step={config.tasks_per_step} this rounds to no replayed "
            f"group; use at least {1 / (config.tasks_per_step + 1):.2g}, or leave it out"
        )
    if config.tasks_per_step > num_tasks:
        logger.warning(
            "tasks_per_step=%d exceeds the %s of the data set: a step repeats tasks, each time as a separate group",
            config.tasks_per_step,
            counted(num_tasks, "task"),
        )
    if config.critic.warmup_steps >= config.num_steps:
        logger.warning(
            "critic.warmup_steps=%d and num_steps=%d: only the critic is updated, the policy never",
            config.critic.warmup_steps,
            config.num_steps,
        )
    if config.optim.warmup_steps > (updates := num_updates(config)):
        logger.warning(
            "optim.warmup_steps=%d is more than the %s of the run: the learning rate never reaches optim.lr",
            config.optim.warmup_steps,
            counted(updates, "update"),
        )


def num_episodes(config: TrainConfig) -> int:
    """Return the episodes of a step, before any is dropped."""
    return config.tasks_per_step * config.rollout.group_size


def num_replayed(config: TrainConfig) -> int:
    """Return the groups of earlier steps that a step is to train on again."""
    return round(config.tasks_per_step * config.data.replay / (1.0 - config.data.replay))


def num_updates(config: TrainConfig) -> int:
    """Return the policy's updates in a run each of whose steps has something to learn."""
    num_steps = config.num_steps - config.critic.warmup_steps  # in which the policy is not updated
    return max(num_steps, 1) * config.optim.num_minibatches * config.optim.num_epochs


def sizes_in_words(config: TrainConfig, num_tasks: int, *, needs_greedy: bool) -> list[str]:
    """Describe the episodes and updates of a step, and the number of passes over the tasks.

    Args:
        config: settled by the trainer.
        num_tasks: training tasks.
        needs_greedy: whether the algorithm compares with a greedy rollout of each task.
    """
    times = config.num_steps * config.tasks_per_step / num_tasks
    tasks = counted(config.tasks_per_step, "task")
    parts = config.optim.num_minibatches
    number = config.optim.num_epochs * parts
    updates = "1 update" if number == 1 else f"{number} updates of {counted(num_episodes(config) // parts, 'episode')}"
    lines = [
        f"{tasks} x {counted(config.rollout.group_size, 'rollout')} = {counted(num_episodes(config), 'episode')} a "
        f"step, {updates}"
    ]
    if needs_greedy:
        lines.append(f"and {counted(config.tasks_per_step, 'greedy rollout')} to compare with, one for each task")
    lines.append(
        f"{counted(config.num_steps, 'step')} x {tasks} = {_times(times)} through the {counted(num_tasks, 'task')}"
    )
    if config.critic.warmup_steps:
        lines.append(f"in the first {counted(config.critic.warmup_steps, 'step')} only the critic is updated")
    if ahead := config.rollout.max_staleness:
        lines.append(f"rollouts run up to {counted(ahead, 'step')} ahead of the updates")
    if number := num_replayed(config):
        last = counted(config.data.replay_steps, "step")
        lines.append(f"and {counted(number, 'group')} of the last {last} again, in each step")
    if rounds := config.rollout.resample_rounds:
        lines.append(f"tasks whose rollouts all earn the same are replaced, at most {_times(rounds)} a step")
    return lines


def _nearest_divisors(whole: int, parts: int) -> str:
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    below, above = [number for number in divisors if number < parts], [number for number in divisors if number > parts]
    return " or ".join(str(number) for number in (*below[-1:], *above[:1]))


def _times(times: float) -> str:
    if times == 1:
        return "once"
    return f"{times:.3g} times" if times < 1000 else f"{times:,.0f} times"
