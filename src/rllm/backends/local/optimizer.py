"""AdamW over float32 master weights, whatever number format the model runs in."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rllm.backends.schedule import learning_rate

logger = logging.getLogger(__name__)

FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices for which torch updates all of a weight in one operation; on a CPU that takes a fifth of the time."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the local backend needs to know to update weights; see `OptimConfig` for the meaning of each."""

    lr: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Updates after which the learning rate has fallen to zero; `None` keeps it."""
    decay: Literal["linear", "cosine"] = "linear"
    """How it falls."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    num_minibatches: int = 1
    num_epochs: int = 1
    micro_batch_tokens: int = 16384
    autocast: bool = False
    offload: bool = False


class MasterAdamW:
    """AdamW with gradient clipping, and a learning rate that rises and falls.

    A bfloat16 weight cannot take in an update of less than 1/256 of itself, so models in that format are updated through
    a float32 copy. Weights of at least 32 bits are updated as they are. With `offload` all of them have a copy, which
    stays in main memory with AdamW's averages, and is updated there.
    """

    def __init__(self, model: torch.nn.Module, settings: OptimizerSettings) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._masters = [_master(weight, offload=settings.offload) for weight in self._weights]
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=all(master.device.type in FUSED for master in self._masters),
        )
        self._settings = settings
        self._num_steps = 0

    @property
    def lr(self) -> float:
        """The learning rate of the latest step."""
        return learning_rate(self._settings, self._num_steps)

    def collect(self) -> None:
        """Move the gradients of a micro-batch to the float32 copies: a sum of many in bfloat16 would lose the small ones."""
        for weight, master in self._copies():
            if weight.grad is not None:
                gradient = weight.grad.to(master.device, master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def step(self) -> float:
        """Update the weights from their gradients, and clear these; returns the gradient's norm before clipping.

        A gradient that is not finite would spoil every weight, so it is left out.
        """
        self._num_steps += 1
        self.collect()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        if norm.isfinite():
            self._apply()
        else:
            logger.warning("update %d is left out: its gradient is not finite (norm %s)", self._num_steps, float(norm))
        self._adamw.zero_grad()
        return float(norm)

    def _apply(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        with torch.no_grad():
            for weight, master in self._copies():
                weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach() for weight, master in self._copies() if _is_coarse(weight)]
        return {"adamw": self._adamw.state_dict(), "masters": masters, "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, for weights that are already those of that moment."""
        coarse = [master for weight, master in self._copies() if _is_coarse(weight)]
        with torch.no_grad():
            for weight, master in self._copies():
                master.copy_(weight)
            for master, saved in zip(coarse, state["masters"], strict=True):
                master.copy_(saved)
        self._adamw.load_state_dict(state["adamw"])
        self._num_steps = state["num_steps"]

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """The weights that have a copy, with it."""
        pairs = zip(self._weights, self._masters, strict=True)
        return [(weight, master) for weight, master in pairs if weight is not master]


def _master(weight: Tensor, *, offload: bool) -> Tensor:
    """What is updated in place of the weight: itself, where it can be."""
    if not (offload or _is_coarse(weight)):
        return weight
    device = torch.device("cpu") if offload else weight.device
    precise = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(device, precise, copy=True).requires_grad_()


def _is_coarse(weight: Tensor) -> bool:
    """Whether small updates are lost on it."""
    return bool(weight.dtype.itemsize < 4)
