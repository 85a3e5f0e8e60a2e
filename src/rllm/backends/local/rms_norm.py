"""RMS norms on a CPU with a gradient in half of the operations and memory that autograd needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


def lean_norms(layers: Iterable[nn.Module]) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Return the forward pass of each trained layer that computes `weight * x / sqrt(mean(x ** 2) + eps)` in float32.

    Each layer with such parts, and without another input, is tried: some multiply by `1 + weight`, or by a gate.
    """
    return {
        layer: partial(_lean_norm, layer)
        for layer in layers
        if hasattr(layer, "variance_epsilon") and _is_rms_norm(layer)
    }


def _lean_norm(layer: nn.Module, states: Tensor) -> Tensor:
    normed: Tensor = _RMSNorm.apply(layer.weight, layer.variance_epsilon, states)
    return normed


def _is_rms_norm(norm: nn.Module) -> bool:
    weight = norm._parameters.get("weight")
    if weight is None or not weight.requires_grad or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    if len(inspect.signature(norm.forward).parameters) > 1:
        return False
    states = torch.linspace(-1, 2, len(weight))[None]
    try:
        with torch.no_grad():
            return bool(norm(states).equal(_lean_norm(norm, states)))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # other arguments
        return False


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]
    """Keeps the states and a number for each, where autograd keeps the normed states, too."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, epsilon: float, states: Tensor) -> Tensor:
        scale = states.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(weight, states, scale)
        return weight * (states * scale)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        weight, states, scale = ctx.saved_tensors
        product = gradient * states
        of_weight = scale.flatten() @ product.flatten(0, -2)
        shrink = (product @ weight).unsqueeze(-1) * scale.pow(3) / -states.shape[-1]
        return of_weight, None, (gradient * weight).mul_(scale).addcmul_(states, shrink)
