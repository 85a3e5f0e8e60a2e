"""Gradients of weights that are added up in place, in the backward pass on a CPU.

A token tree is computed in several passes, and a tied head has the weights of the embeddings. By itself autograd keeps
the gradient of every use of a weight until the last one has come, which takes as much memory as the weights, and time
to add them. Here linear layers and embeddings add each use to `weight.grad` at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import embedding, linear

from rllm.backends.local.policy import running_otherwise


def summing_in_place(model: nn.Module) -> AbstractContextManager[None]:
    """Add up the gradients of these trained layers' weights in place, inside a block with forward and backward pass.

    The backward pass belongs in the block because checkpointed layers are run again there. `torch.autograd.grad`
    returns none of these gradients.
    """
    trained = [
        (module, _FORWARD_OF[type(module)])
        for module in model.modules()
        if type(module) in _FORWARD_OF and module.weight.requires_grad and module.weight.device.type == "cpu"
    ]
    return running_otherwise({module: partial(forward, module) for module, forward in trained})


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # which multiplies copies in another format
        return linear(inputs, layer.weight, layer.bias)
    outputs: Tensor = _Linear.apply(inputs, layer.weight, layer.bias)
    return outputs


def _embedding(layer: nn.Embedding, ids: Tensor) -> Tensor:
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        return type(layer).forward(layer, ids)
    states: Tensor = _Embedding.apply(ids, layer.weight, layer.padding_idx)
    return states


_FORWARD_OF: dict[type, Callable[..., Tensor]] = {nn.Linear: _linear, nn.Embedding: _embedding}


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight  # a saved tensor may come back as a copy
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        [inputs], weight = ctx.saved_tensors, ctx.weight
        of_inputs, _, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        factors = rows.t(), inputs.flatten(0, -2)
        if weight.grad is None:
            weight.grad = torch.mm(*factors)
        else:
            weight.grad.addmm_(*factors)
        return gradient @ weight if of_inputs else None, None, rows.sum(0) if of_bias else None


class _Embedding(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, None, None]:
        [ids], weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        trained = ids != (-1 if ctx.padding is None else ctx.padding)
        weight.grad.index_add_(0, ids[trained], gradient[trained])
        return None, None, None
