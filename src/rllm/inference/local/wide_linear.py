"""Linear layers in float32 whose products, forwards and backwards, use the whole width of a CPU's registers.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's CPUs and AVX2 on others. oneDNN, which torch brings along
for other things, writes a program for each shape of product and uses what there is: on an AMD of the fifth Zen generation that
is 2.2 times as fast, of one thread 227 GFLOP/s for 100.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rllm.inference.local.kernels import has_linear_products, linear_product

_WORTH_IT = 2**25
"""Multiplications of a product from which on oneDNN's program for its shape, 0.3 ms, is saved by a few layers."""
_CPU_INFO = Path("/proc/cpuinfo")


def use_wide_products(model: nn.Module) -> None:
    """Let a model's linear layers multiply by oneDNN on a CPU where that is faster. All weights stay what and where they are."""
    if not helps_here():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, WideLinear(child))


@cache
def helps_here() -> bool:
    """Whether this CPU has AVX-512, and is none of Intel's; known on Linux only."""
    return (
        has_linear_products()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _CPU_INFO.exists()
        and "GenuineIntel" not in _CPU_INFO.read_text()
    )


class WideLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with all that another one has: parameters, and hooks, some of which compute the weight from others."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(linear.__dict__)

    def forward(self, inputs: Tensor) -> Tensor:
        if self._is_wide(inputs):
            outputs: Tensor = _Product.apply(inputs, self.weight, self.bias)
            return outputs
        return super().forward(inputs)

    def _is_wide(self, inputs: Tensor) -> bool:
        """Small products, and what autocast does in bfloat16, are torch's own."""
        return (
            inputs.device.type == "cpu"
            and inputs.dtype == self.weight.dtype == torch.float32
            and math.prod(inputs.shape) * self.out_features >= _WORTH_IT
            and not torch.is_autocast_enabled("cpu")
        )


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """x [..., K], weight [N, K], bias [N] or None -> [..., N]"""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As in torch's own: below an adapter, whose layers are frozen, they would be memory for nothing.
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        return linear_product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        [gradient] = gradients
        gradient = gradient.contiguous()  # oneDNN takes a hundred times as long for one that is expanded, as a sum's
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = linear_product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            of_weight = _sum_of_outer_products(_rows(gradient), _rows(inputs))
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient).sum(0)
        return of_inputs, of_weight, of_bias


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    """[N, K] of [rows, N] and [rows, K]. oneDNN copies the first of its factors to transpose it, so that is the narrower one."""
    if left.shape[1] <= right.shape[1]:
        return linear_product(left.t(), right.t())
    return linear_product(right.t(), left.t()).t()
