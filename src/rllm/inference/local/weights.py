"""Weights that a folder lacks, or that are no numbers: told as they are loaded, and not by what the model then says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rllm.errors import ConfigError


def check_complete(source: str, model: Any, found: Mapping[str, Any]) -> None:
    """`transformers` makes up the weights that it does not find, with a warning.

    Raises:
        ConfigError: if it did.
    """
    made_up = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if made_up:
        others = ", ..." if len(made_up) > 3 else ""
        raise ConfigError(
            f"model={source!r}: {len(made_up)} of the weights of {type(model).__name__} are not there, or have other shapes, and would "
            f"be random ({', '.join(made_up[:3])}{others}): download or save the folder again"
        )


def check_finite(source: str, model: Any) -> None:
    """Whatever is tried of a model whose weights are no numbers would fail, and be put down to its architecture.

    Raises:
        ConfigError: if a weight is infinite or NaN.
    """
    spoilt = next((name for name, weight in model.named_parameters() if not is_finite(weight)), None)
    if spoilt is not None:
        raise ConfigError(
            f"model={source!r}: {spoilt} is infinite or NaN, as after an update that failed: download or save the folder again, "
            "or name an earlier checkpoint"
        )


def is_finite(weight: torch.Tensor) -> bool:
    """Whether all of a weight are numbers."""
    return bool(weight.detach().sum(dtype=torch.float32).isfinite())
