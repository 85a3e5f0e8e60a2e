"""A second model to sample from while the first is trained; what is frozen, such as all that LoRA leaves alone, they share."""

from __future__ import annotations

import copy
from typing import Any

import torch


def sampling_copy(model: Any) -> Any:
    """A model of the same weights, with trained ones of its own."""
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, memo=frozen).requires_grad_(False)


def copy_trained(model: Any, to: Any) -> None:
    """Bring the weights of a `sampling_copy` up to date."""
    with torch.no_grad():
        for weight, copied in zip(model.parameters(), to.parameters(), strict=True):
            if weight.requires_grad:
                copied.copy_(weight)
