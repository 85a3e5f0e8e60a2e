"""Layers whose weights' gradients are added to `weight.grad` by the very product that computes them.

Autograd makes each gradient as a tensor of its own and then adds it to the sum of earlier passes, and for an embedding
it fills the whole of it with zeros first. On a CPU that takes as long as the layers take for some thirty tokens, in
every pass, and more memory. Gradients are the same but for rounding.
"""

from __future__ import annotations

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
