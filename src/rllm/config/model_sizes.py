"""Models by size: learning rate, lengths and hardware that suit each class, and the size of a given model.

One table serves the default of `optim.lr`, the warning about an unusual rate, and docs/models-by-size.md.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.config.schema import TrainConfig

logger = logging.getLogger(__name__)

PAGE = "docs/models-by-size.md"
BY_SIZE = "by model size"
FAR = 10.0
"""Factor to the rate of the table beyond which a rate is warned about, upwards or downwards."""
GB = 1e9
FLOAT32, BFLOAT16, ADAMW = 4, 2, 8
"""Bytes of a weight or gradient in each format, and of AdamW's two running means, which are float32."""

_IN_A_NAME = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_UNITS = {"m": 1e6, "b": 1e9}
_NOTED = re.compile(rf"^  lr: (\S+)  # ({BY_SIZE}.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SizeClass:
    """Models of similar size, with the settings that suit them."""

    up_to: float
    """Largest number of weights, all experts included."""
    name: str
    examples: str
    typical: float
    """Weights of the model whose memory the page gives."""
    full: float
    """Learning rate of reinforcement learning that trains all weights."""
    lora: float
    """The same where an adapter is trained."""
    sft: float
    """Learning rate of supervised fine-tuning that trains all weights."""
    sft_lora: float
    group_size: str
    answer_tokens: str
    hardware: str

    def rate(self, *, lora: bool, demonstrates: bool) -> float:
        """Return the learning rate for this kind of training."""
        if demonstrates:
            return self.sft_lora if lora else self.sft
        return self.lora if lora else self.full


TABLE = (
    SizeClass(
        up_to=1e7,
        name="up to 10 M",
        examples="the tiny policies of the demo, the examples and `rllm.testing`",
        typical=4e6,
        full=3e-4,
        lora=1e-3,
        sft=1e-3,
        sft_lora=2e-3,
        group_size="8",
        answer_tokens="8-64",
        hardware="two CPU cores, a second a step",
    ),
    SizeClass(
        up_to=6e7,
        name="10-60 M",
        examples="models of your own",
        typical=3e7,
        full=1e-4,
        lora=5e-4,
        sft=5e-4,
        sft_lora=1e-3,
        group_size="8",
        answer_tokens="32-128",
        hardware="two CPU cores",
    ),
    SizeClass(
        up_to=2.5e8,
        name="60-250 M",
        examples="SmolLM2-135M",
        typical=1.35e8,
        full=2e-5,
        lora=2e-4,
        sft=1e-4,
        sft_lora=5e-4,
        group_size="8",
        answer_tokens="32-256",
        hardware="two CPU cores and 8 GB, 12-20 s a step of 64 short answers; any GPU",
    ),
    SizeClass(
        up_to=8e8,
        name="250-800 M",
        examples="SmolLM2-360M, Qwen3-0.6B",
        typical=6e8,
        full=5e-6,
        lora=5e-5,
        sft=2e-5,
        sft_lora=2e-4,
        group_size="8",
        answer_tokens="256-1,024",
        hardware="one GPU of 24 GB",
    ),
    SizeClass(
        up_to=2e9,
        name="0.8-2 B",
        examples="Llama-3.2-1B, Qwen3-1.7B",
        typical=1.7e9,
        full=2e-6,
        lora=2e-5,
        sft=2e-5,
        sft_lora=2e-4,
        group_size="8",
        answer_tokens="512-2,048",
        hardware="one GPU of 48-80 GB; LoRA one of 16-24 GB",
    ),
    SizeClass(
        up_to=5e9,
        name="2-5 B",
        examples="SmolLM3-3B, Qwen3-4B",
        typical=4e9,
        full=1e-6,
        lora=1e-5,
        sft=1e-5,
        sft_lora=1e-4,
        group_size="8-16",
        answer_tokens="1,024-4,096",
        hardware="one GPU of 80 GB with `optim.offload`, or two and more with verl; LoRA one of 24-48 GB",
    ),
    SizeClass(
        up_to=1e10,
        name="5-10 B",
        examples="Llama-3.1-8B, Qwen3-8B",
        typical=8e9,
        full=1e-6,
        lora=1e-5,
        sft=1e-5,
        sft_lora=1e-4,
        group_size="8-16",
        answer_tokens="1,024-8,192",
        hardware=(
            "4-8 GPUs of 80 GB with verl, or one with `optim.offload` and 160 GB of main memory; LoRA one of 48-80 GB"
        ),
    ),
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
        number = num_weights(folder if folder.is_dir() else _cached(model))
    except (OSError, ValueError, KeyError, OverflowError):  # a damaged file, which loading the model reports
        number = None
    return _stated(folder.name) if number is None else number


def size_in_words(model: str) -> str:
    """Describe the size of a model's files, such as `135M parameters, 269 MB`, or that they are downloaded first.

    Returns an empty text if the files are damaged or their size is unknown.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _cached(model)
        if not folder.is_dir():
            is_hub_id = _HUB_ID.fullmatch(model) and not Path(model).parent.is_dir()
            return "not on this machine yet, so it is downloaded first" if is_hub_id else ""
    files = [path for kind in ("*.safetensors", "*.bin") for path in sorted(folder.glob(kind))]
    try:
        size, number = sum(path.stat().st_size for path in files), num_weights(folder)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):  # which loading the model reports
        return ""
    of = "of an adapter" if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists() else ""
    parameters = f"{_in_units(number, ('', 'K', 'M', 'B', 'T'))} parameters {of}".rstrip() if number else ""
    return ", ".join(
        filter(None, [parameters, _in_units(size, (" bytes", " kB", " MB", " GB", " TB")) if size else ""])
    )


def _in_units(value: float, units: Sequence[str]) -> str:
    """Format a size in three digits and the greatest unit that fits."""
    power = min(int(math.log10(max(value, 1)) + 1e-9) // 3, len(units) - 1)
    scaled = value / 1000**power
    return f"{scaled:.3g}{units[power]}" if scaled < 999.5 else f"{scaled:.0f}{units[power]}"


def with_learning_rate(config: TrainConfig, *, demonstrates: bool, resumed: str = "") -> tuple[TrainConfig, str | None]:
    """Return the configuration with `optim.lr` set, and the origin of a rate that the user did not set.

    Args:
        config: keeps the rate that it has; else it gets the one that suits the size of the model.
        demonstrates: true for supervised fine-tuning.
        resumed: text of the `config.yaml` of a resumed run, whose rate stays.
    """
    earlier = _NOTED.search(resumed)
    if earlier is not None and config.optim.lr in (None, float(earlier[1])):
        return _with_rate(config, float(earlier[1])), earlier[2]
    if config.optim.lr is not None:
        return config, None
    number = size_of(config.model.path)
    size_class = TABLE[-1] if number is None else class_of(number)
    rate = size_class.rate(lora=bool(config.model.lora_rank), demonstrates=demonstrates)
    origin = f"{BY_SIZE}: {_kind(config, demonstrates, number)}"
    logger.info("optim.lr=%g, %s (%s)", rate, origin, PAGE)
    return _with_rate(config, rate), origin


def _with_rate(config: TrainConfig, rate: float) -> TrainConfig:
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": rate})})


def with_rate_origin(settings: str, origin: str | None) -> str:
    """Return the text of a `config.yaml` with the origin of its learning rate as a comment."""
    head, optim, tail = settings.partition("\noptim:\n")
    if origin is None or not optim:
        return settings
    return head + optim + re.sub(r"^  lr: \S+$", rf"\g<0>  # {origin}", tail, count=1, flags=re.MULTILINE)


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
    if max(lr / usual, usual / lr) <= FAR * (1 + 1e-9):  # tolerates the rounding of a factor of ten
        return []
    far, risk = (
        (f"{_plain(lr / usual)} times", "collapse") if lr > usual else (f"1/{_plain(usual / lr)} of", "learn nothing")
    )
    kind = _kind(config, demonstrates, number)
    return [f"optim.lr={lr:g} is {far} the usual {usual:g} ({kind}): the policy may {risk}; see {PAGE}"]


def trained_bytes(num_weights: float, *, itemsize: int, lora: bool = False, offload: bool = False) -> dict[str, float]:
    """Return the bytes that a model takes on its device while it is trained in this process, by purpose.

    Weights of 16 bits are updated through a float32 copy, beside which their gradients are summed (`MasterAdamW`). With
    `offload` the copy, its gradient and AdamW's means are in main memory. An adapter itself is small.
    """
    weights = num_weights * itemsize
    if lora:
        return {"weights": weights}
    if offload:
        return {"weights": weights, "gradients": weights}
    if itemsize >= FLOAT32:
        return {"weights": weights, "gradients": weights, "AdamW": num_weights * ADAMW}
    copies = num_weights * FLOAT32
    return {"weights": weights, "gradients": weights + copies, "AdamW and float32 copy": copies + num_weights * ADAMW}


def markdown() -> Iterator[str]:
    """Yield the lines of the tables of docs/models-by-size.md."""
    yield "| weights | such as | `optim.lr` | with LoRA | `rllm sft` | `rllm sft` with LoRA |"
    yield "| -- | -- | -- | -- | -- | -- |"
    for item in TABLE:
        rates = (item.full, item.lora, item.sft, item.sft_lora)
        yield f"| {item.name} | {item.examples} | {' | '.join(f'`{_short(rate)}`' for rate in rates)} |"
    yield ""
    yield "| weights | `rollout.group_size` | tokens of an answer | memory, all weights | memory, LoRA | hardware |"
    yield "| -- | -- | -- | -- | -- | -- |"
    for item in TABLE:
        itemsize = FLOAT32 if item.typical <= TABLE[2].up_to else BFLOAT16
        full, lora = (trained_bytes(item.typical, itemsize=itemsize, lora=lora) for lora in (False, True))
        sizes = " | ".join(f"{_gigabytes(sum(parts.values()))} GB" for parts in (full, lora))
        yield f"| {item.name} | {item.group_size} | {item.answer_tokens} | {sizes} | {item.hardware} |"


def _short(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def _plain(number: float) -> str:
    """Return a number with three digits and without an exponent: `1,670`."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _gigabytes(size: float) -> str:
    return f"{size / GB:.2g}" if size < GB else f"{size / GB:.0f}"


def _kind(config: TrainConfig, demonstrates: bool, number: float | None) -> str:
    trained = "LoRA" if config.model.lora_rank else "all weights"
    training = "supervised fine-tuning" if demonstrates else "reinforcement learning"
    if number is None:
        size = f"of unknown size (model.path={config.model.path!r}), taken as large"
    else:
        size = f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
        size = f"of {size if number >= 1e6 else _plain(number)} weights"
    return f"{training} of {trained}, model {size}"


def _numbers_in(path: Path) -> int:
    """Return the number of weights in a safetensors file: eight bytes of length, then that many bytes of JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: Any = json.loads(file.read(length)) if length <= path.stat().st_size else None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is cut off, or not a file of safetensors")
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _cached(hub_id: str) -> Path:
    """Return the folder in which the hub's cache has a model; one that does not exist if it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(hub_id, "config.json")
    except (ImportError, ValueError):  # the latter for what is not a hub id
        found = None
    return Path(found).parent if isinstance(found, str) else Path(hub_id)


def _stated(name: str) -> float | None:
    found = _IN_A_NAME.search(name)
    return None if found is None else int(found[1] or 1) * float(found[2]) * _UNITS[found[3].lower()]
