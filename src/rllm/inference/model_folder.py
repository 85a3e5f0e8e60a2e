"""A model's folder: checks before anything of it is loaded, and `from_pretrained`. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from rllm._runtime.files import is_named_by
from rllm.config.sizes import is_offline, local_folder
from rllm.errors import ConfigError, first_line
from rllm.types import JSONMapping

TRUSTED_MODELS = "RLLM_TRUSTED_MODELS"
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
"""Files that tokenizers are read from; without any, `transformers` makes some with a handful of tokens."""


def checked_source(path_or_id: str | Path) -> str:
    """Return the source for `transformers`; anything that looks like a path is never looked up on the hub.

    Raises:
        ConfigError: if it is a path, but not to a model's folder; if it is in a format for other programs; or if
            it is a hub id that must be downloaded, and HF_HUB_OFFLINE forbids that.
    """
    name, folder = f"model.path={str(path_or_id)!r}", Path(path_or_id).expanduser()
    if folder.suffix.lower() == ".gguf" and folder.exists():
        raise ConfigError(f"{name} is a GGUF file, {_convert(folder)}")
    if folder.is_dir():
        if (files := sorted(folder.glob("*.gguf"))) and not _weights_in(folder):
            raise ConfigError(f"{name} is a folder of GGUF files, {_convert(files[0])}")
        if not (folder / "config.json").is_file():
            of_run = ", such as a checkpoint of this run" if (folder / "checkpoints").is_dir() else ""
            raise ConfigError(f"{name}: the folder has no config.json: use a Hugging Face model folder{of_run}")
        return str(folder)
    if folder.exists():
        raise ConfigError(f"{name} is a file: use the folder that holds config.json")
    if _looks_like_path(path_or_id):
        raise ConfigError(f"{name}: no such folder; check the path, or use a hub id (owner/name)")
    if str(path_or_id).lower().endswith("-gguf"):
        raise ConfigError(f"{name} holds GGUF files, which cannot be trained: use the id of the original model")
    if is_offline() and not local_folder(str(path_or_id)).is_dir():
        raise ConfigError(
            f"{name}: it is not in the hub's cache, and HF_HUB_OFFLINE is set, so it is not downloaded: unset that, "
            "or name a folder"
        )
    return str(path_or_id)


def _convert(file: Path) -> str:
    return (
        "which cannot be trained: use the folder or hub id of the original model, or convert it: `pip install gguf "
        f"accelerate`, then from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}, dtype=torch.float32) of "
        "transformers' AutoModelForCausalLM and AutoTokenizer, `model.hf_quantizer = None`, `del "
        "model.config.quantization_config` where it has one, and save_pretrained(FOLDER) of both"
    )


def _looks_like_path(path_or_id: str | Path) -> bool:
    """Return whether this is not `owner/name`; `folder/name` is a path if that folder exists."""
    if isinstance(path_or_id, Path):
        return True
    owner, _, name = path_or_id.partition("/")
    return not name or "/" in name or "\\" in name or owner in ("", ".", "..", "~") or Path(owner).is_dir()


def check_files(folder: Path) -> None:
    """Check that a model's folder is whole; raise `ConfigError` naming what is missing or damaged."""
    if problem := incomplete(folder):
        raise ConfigError(f"model.path={str(folder)!r} {problem}: download or save the folder again, whole")


def check_not_quantized(path_or_id: str | Path, about: JSONMapping) -> None:
    """Raise `ConfigError` if a model's `config.json` states that its weights are quantized.

    Layers of other packages would compute otherwise in the sampler than in the trainer, and be neither packed nor
    counted as linear ones.
    """
    if quantized := about.get("quantization_config"):
        method = quantized.get("quant_method", "an unknown method")
        raise ConfigError(
            f"model.path={str(path_or_id)!r}: its weights are quantized ({method}), so neither they nor an adapter on "
            "them can be trained: use the original model, which model.quantize=nf4 with model.lora_rank=16 quantizes "
            "when it is loaded"
        )


def config_in(folder: Path, name: str = "config.json") -> JSONMapping:
    """Return a JSON file of a model's folder; empty if there is none, or if it cannot be read."""
    try:
        about = json.loads((folder / name).read_bytes())
    except (OSError, ValueError):  # loading the model reports it
        return {}
    return about if isinstance(about, dict) else {}


def missing_files(folder: Path) -> list[str]:
    """Return the files that a model folder lacks; an adapter's folder has others."""
    if (folder / "adapter_config.json").exists():
        return []
    indexes = list(folder.glob("*.index.json"))
    parts = {name for index in indexes for name in json.loads(index.read_text())["weight_map"].values()}
    lacking = sorted(name for name in parts if not (folder / name).exists())
    if not (folder / "config.json").exists():
        lacking.append("config.json")
    if not parts and not _weights_in(folder):
        lacking.append("weights (*.safetensors)")
    if not any(any(folder.glob(name)) for name in _VOCABULARIES):
        lacking.append("a tokenizer (tokenizer.json)")
    return lacking


def _weights_in(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


def incomplete(folder: Path) -> str:
    """Return what is missing or damaged in a model folder; empty if the folder does not exist."""
    if not folder.is_dir():
        return ""
    if damaged := [path.name for path in sorted(folder.glob("*.json")) if not _is_json(path)]:
        return f"has files that are not JSON: {', '.join(damaged)}"
    if missing := missing_files(folder):
        return f"lacks {', '.join(missing)}"
    if cut := [path.name for path in sorted(folder.glob("*.safetensors")) if not _is_whole(path)]:
        return f"has files that were cut off: {', '.join(cut)}"
    return ""


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict | list)
    except (OSError, ValueError):
        return False


def _is_whole(weights: Path) -> bool:
    """Return whether a file is as long as its header states, see https://huggingface.co/docs/safetensors."""
    size = weights.stat().st_size
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length < size else {}
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return bool(8 + length + max(ends, default=0) == size)


# --- loading ---------------------------------------------------------------------------------------------------------


def may_bring_code(source: str) -> bool:
    """Return whether the user trusts the code of a model folder or hub id, by naming it in RLLM_TRUSTED_MODELS."""
    named = os.environ.get(TRUSTED_MODELS, "").split(os.pathsep)
    return is_named_by(TRUSTED_MODELS, Path(source)) if Path(source).is_dir() else source in named


def from_pretrained(
    load: Callable[..., Any], source: str, part: str, *, setting: str = "model.path", **options: Any
) -> Any:
    """Call a `from_pretrained`. A model's own code is run only if `RLLM_TRUSTED_MODELS` names its folder.

    `setting` names the source in errors.

    Raises:
        ConfigError: naming the setting and the remedy, which the library's own errors do not.
    """
    from safetensors import SafetensorError

    try:
        with without_bars():
            return load(source, trust_remote_code=may_bring_code(source), **options)
    except UnpicklingError as error:
        raise ConfigError(
            f"{setting}={source!r}: cannot load its {part}: they are pickled and hold more than tensors, which could "
            f"run code ({first_line(error)}); save the model again with safetensors"
        ) from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            remedy = (
                "it brings code of its own (auto_map in its config.json), which is not run; use a model known to "
                f"transformers, or read the code and set {TRUSTED_MODELS}={source}"
            )
        elif isinstance(error, ImportError):
            remedy = "it needs a package that is not installed, or not in a version that fits"
        elif Path(source).is_dir():
            remedy = "the folder must hold config.json, the weights (*.safetensors) and the tokenizer's files"
        else:
            remedy = (
                "no such local folder, and the hub did not provide it; check the id and the network, "
                "download it, or set HF_HUB_OFFLINE=1 to use only what is already cached"
            )
        raise ConfigError(f"{setting}={source!r}: cannot load its {part}: {remedy} ({first_line(error)})") from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide `transformers`' progress bars, except for downloads."""
    from transformers.utils import logging

    before = logging.set_tqdm_hook(lambda make, args, options: make(*args, **{**options, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
