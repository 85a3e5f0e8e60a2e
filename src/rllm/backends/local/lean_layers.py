"""Layers on a CPU whose backward pass takes fewer operations and less memory than autograd's.

Autograd makes each gradient of a weight as a tensor of its own and then adds it to those of earlier passes, and for an
embedding it fills the whole of it with zeros first. On a CPU that takes as long as the layers take for some thirty
tokens, in every pass, and more memory. Here the very product that computes a gradient adds it to `weight.grad`, and RMS
norms keep a number for each state instead of the normed states. Gradients are the same but for rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import embedding, linear

Forward: TypeAlias = Callable[..., Tensor]


def can_sum(layer: nn.Module) -> bool:
    """Return whether the layer is a linear one on a CPU, trained in its own number format."""
    return type(layer) is nn.Linear and _is_trained(layer.weight)


def summed(layers: Iterable[nn.Module]) -> dict[nn.Module, Forward]:
    """Return the forward pass of each of these layers that can add its gradient in place; with gradients on."""
    found: dict[nn.Module, Forward] = {}
    for layer in layers:
        if can_sum(layer):
            found[layer] = partial(summed_linear, layer)
        elif type(layer) is nn.Embedding and _is_trained(layer.weight) and _is_plain(layer):
            found[layer] = partial(_Embedding.apply, layer.weight, layer)
    return found


def _is_trained(weight: Tensor) -> bool:
    return weight.requires_grad and weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _is_plain(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def summed_linear(layer: nn.Linear, *given: Tensor, prepare: Forward | None = None) -> Tensor:
    """Return `layer(prepare(*given))`, keeping only `given` for the backward pass; by default that is the input."""
    output: Tensor = _Linear.apply(layer.weight, layer.bias, layer, prepare, *given)
    return output


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    # The weight is an argument so that the output requires a gradient. The backward pass takes it from the layer: a
    # saved one may be another tensor under checkpointing.

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Tensor, bias: Tensor | None, layer: nn.Linear, prepare: Forward | None, *given: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.layer, ctx.prepare = layer, prepare
        return linear(prepare(*given) if prepare else given[0], weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            inputs = ctx.prepare(*given) if ctx.prepare else given[0]
        weight, rows = ctx.layer.weight, gradient.flatten(0, -2)
        factors = rows.t(), inputs.detach().flatten(0, -2)
        if weight.grad is None:
            weight.grad = torch.mm(*factors)
        else:
            weight.grad.addmm_(*factors)
        _, of_bias, _, _, *of_given = ctx.needs_input_grad
        found: tuple[Tensor | None, ...] = (None,) * len(given)
        if any(of_given):
            of_inputs = (rows @ weight).view(inputs.shape)
            found = torch.autograd.grad(inputs, given, of_inputs) if ctx.prepare else (of_inputs,)
        return None, rows.sum(0) if of_bias else None, None, None, *found


class _Embedding(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, layer: nn.Embedding, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer = layer
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, None, None]:
        weight, ids, rows = ctx.layer.weight, ctx.saved_tensors[0].flatten(), gradient.flatten(0, -2)
        if ctx.layer.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.layer.padding_idx)[:, None], 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids, rows)
        return None, None, None


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
