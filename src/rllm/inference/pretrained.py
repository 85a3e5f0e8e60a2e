"""Calls of `transformers`' `from_pretrained`: which code may run, and errors that name the setting. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from rllm._runtime.files import is_named_by
from rllm.errors import ConfigError, first_line

TRUSTED_MODELS = "RLLM_TRUSTED_MODELS"


def may_bring_code(source: str) -> bool:
    """Return whether the user trusts the code of a model folder or hub id, by naming it in RLLM_TRUSTED_MODELS."""
    named = os.environ.get(TRUSTED_MODELS, "").split(os.pathsep)
    return is_named_by(TRUSTED_MODELS, Path(source)) if Path(source).is_dir() else source in named


def from_pretrained(load: Callable[..., Any], source: str, part: str, *, setting: str = "model", **options: Any) -> Any:
    """Call a `from_pretrained`. A model's own code is run only if `RLLM_TRUSTED_MODELS` names its folder.

    `setting` names the source in errors.

    Raises:
        ConfigError: naming the setting and the remedy, which the library's own errors do not.
    """
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
        elif Path(source).is_dir():
            remedy = "the folder must hold config.json, the weights (*.safetensors) and the tokenizer's files"
        else:
            remedy = (
                "there is no such local folder, and the hub did not provide it; check the id and the network, "
                "download it, or set HF_HUB_OFFLINE=1 to use only what is already cached"
            )
        raise ConfigError(f"{setting}={source!r}: cannot load its {part}: {remedy} ({first_line(error)})") from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide `transformers`' progress bars, except those of downloads."""
    before = logging.set_tqdm_hook(lambda make, args, options: make(*args, **{**options, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
