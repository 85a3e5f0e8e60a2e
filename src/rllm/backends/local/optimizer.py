"""AdamW over float32 master weights, whatever number format the model runs in, and gradient accumulation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Batch
from rllm.backends.update import Schedule
from rllm.config.schema import OptimConfig
from rllm.inference.local.quantized import bitsandbytes_for
from rllm.types import JSONObject

logger = logging.getLogger(__name__)

FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch updates a whole weight in one operation; on a CPU that takes a fifth of the time."""


class MasterAdamW:
    """AdamW with gradient clipping and a learning rate schedule.

    A bfloat16 weight cannot represent an update of less than 1/256 of itself, so models in that format are updated
    through a float32 copy. Weights of at least 32 bits are updated in place. With `offload` every weight has a copy,
    which stays in main memory with AdamW's averages and is updated there.
    """

    def __init__(self, model: torch.nn.Module, settings: OptimConfig, schedule: Schedule | None = None) -> None:
        """Prepare the weights that are trained; `schedule` overrides the constant rate of `settings`."""
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._masters = [_master(weight, offload=settings.offload) for weight in self._weights]
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        pairs = zip(self._weights, self._masters, strict=True)
        of_embeddings = {master for weight, master in pairs if id(weight) in embeddings}
        self._optimizers = _optimizers(self._masters, settings, embeddings=of_embeddings)
        self._settings = settings
        self._schedule = schedule or Schedule(lr=settings.rate, warmup_steps=settings.warmup_steps)
        self._num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the latest step."""
        return self._schedule.learning_rate(self._num_steps)

    def collect(self) -> None:
        """Add a micro-batch's gradients to the float32 copies: a sum of many in bfloat16 would lose the small ones."""
        for weight, master in self._copies():
            if weight.grad is not None:
                gradient = weight.grad.to(master.device, master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def step(self) -> float:
        """Update the weights, clear their gradients, and return the gradient's norm before clipping.

        A gradient that is not finite would spoil every weight, so that step is skipped.
        """
        self._num_steps += 1
        self.collect()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        if norm.isfinite():
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr
                optimizer.step()
            with torch.no_grad():
                for weight, master in self._copies():
                    weight.copy_(master)
        else:
            logger.warning("update %d is skipped: its gradient is not finite (norm %s)", self._num_steps, float(norm))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return float(norm)

    def state_dict(self) -> JSONObject:
        masters = [master.detach() for weight, master in self._copies() if _is_coarse(weight)]
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"adamw": states, "masters": masters, "num_steps": self._num_steps}

    def load_state_dict(self, state: JSONObject) -> None:
        """Resume from a `state_dict`; the weights must already be from the same moment."""
        coarse = [master for weight, master in self._copies() if _is_coarse(weight)]
        with torch.no_grad():
            for weight, master in self._copies():
                master.copy_(weight)
            for master, saved in zip(coarse, state["masters"], strict=True):
                master.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["adamw"], strict=True):
            optimizer.load_state_dict(saved)
        self._num_steps = state["num_steps"]

    def memory(self) -> dict[str, int]:
        """Return the bytes of the gradients, and of the averages and copies of weights."""
        states = [value for each in self._optimizers for state in each.state.values() for value in state.values()]
        held = [*(master for _, master in self._copies()), *filter(torch.is_tensor, states)]
        gradients = [each.grad for each in {*self._weights, *self._masters} if each.grad is not None]
        return {"gradients": _bytes(gradients), "optimizer": _bytes(held)}

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return the weights that have a copy, each with it."""
        pairs = zip(self._weights, self._masters, strict=True)
        return [(weight, master) for weight, master in pairs if weight is not master]


def _optimizers(masters: Sequence[Tensor], settings: OptimConfig, *, embeddings: Set[Tensor]) -> list[Optimizer]:
    """Return AdamW; with `adamw8bit`, AdamW for embeddings and one with 8-bit averages for other weights.

    The gradients of embeddings vary most from row to row, so their averages keep 32 bits (Dettmers et al. 2021,
    section 2.3), and so do the averages of small weights.
    """
    options = {
        "lr": settings.rate,
        "betas": (settings.beta1, settings.beta2),
        "weight_decay": settings.weight_decay,
    }
    in_8_bits = [master for master in masters if master not in embeddings] if settings.name == "adamw8bit" else []
    optimizers: list[Optimizer] = []
    if in_8_bits:
        package = bitsandbytes_for("optim.name='adamw8bit'", in_8_bits[0].device)
        optimizers.append(package.optim.AdamW8bit(in_8_bits, **options))
        masters = [master for master in masters if master in embeddings]
    if masters:
        fused = all(master.device.type in FUSED for master in masters)
        optimizers.append(torch.optim.AdamW(masters, **options, fused=fused))
    return optimizers


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _master(weight: Tensor, *, offload: bool) -> Tensor:
    if not (offload or _is_coarse(weight)):
        return weight
    device = torch.device("cpu") if offload else weight.device
    precise = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(device, precise, copy=True).requires_grad_()


def _is_coarse(weight: Tensor) -> bool:
    """Return whether the weight's format is too coarse for small updates."""
    return bool(weight.dtype.itemsize < 4)


LossOf: TypeAlias = Callable[[Batch], tuple[Tensor, Sums, Tensor]]
"""Loss of part of a batch, sums over its tokens, and the estimates [N] that the loss is computed from."""


def accumulate(
    batch: Batch,
    loss_of: LossOf,
    optimizer: MasterAdamW,
    *,
    max_tokens: int,
    aim: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Counter[str]]:
    """Add the gradient of `scale` times the loss, computed in the micro-batches of `Batch.split`.

    The loss is a sum over tokens whose weights were fixed for the whole batch, so the gradients of its parts add up to
    its own, however many there are.

    Returns:
        The estimates [N], detached, in main memory; and the sums, `loss` among them.
    """
    sums: Counter[str] = Counter()
    pieces = []
    for indices in batch.split(max_tokens, aim):
        loss, part_sums, estimates = loss_of(batch.select(indices))
        (loss * scale).backward()
        optimizer.collect()
        sums.update({name: float(value) for name, value in part_sums.items()})
        sums.update({"loss": float(loss.detach()) * scale})
        pieces.append(estimates.detach().cpu())
    return torch.cat(pieces), sums
