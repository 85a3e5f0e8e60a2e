"""Linear layers as a CPU multiplies by them fastest: the sampler's own layout of the trainer's weights.

In oneDNN's layout a product takes 0.6 to 0.9 of the time of a plain one (0.4 in bfloat16), and each of its rows is the same,
bit for bit, whatever other rows there are. Weights change once a training step, and are then packed anew.

The matrix units of Intel's CPUs (AMX), which do bfloat16, sum in an order that depends on the number of rows. There all products
have as many rows: a prompt's cost two to three times as much for it, those of a step with as many sequences nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rllm._runtime.main_memory import total_memory
from rllm.inference.local.kernels import has_linear_products, linear_product
from rllm.inference.local.wide_linear import WideLinear

_ROWS = 64
"""The number of rows that a layout is chosen for, which serves any other as well; and of all products on matrix units."""
_SHARE_OF_MEMORY = 8
"""Weights are packed where that takes at most this part of the main memory that this process may use."""


def can_pack(model: Any) -> bool:
    """Whether the model is in float32 on a CPU that oneDNN knows, and small enough to be held once more."""
    return (
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and has_linear_products()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and sum(weight.nbytes for weight in model.parameters()) * _SHARE_OF_MEMORY <= total_memory()
    )


def multiplies_bfloat16() -> bool:
    """Whether oneDNN does on this CPU: most of those of laptops, which have no AVX512, it leaves out."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedModel:
    """A copy of a model that multiplies by packed weights; it shares all its tensors with the model."""

    def __init__(self, model: Any, *, autocast: bool = False) -> None:
        """With `autocast` products are done in bfloat16, where that can be, and everything else in the model's own format."""
        self.products = torch.bfloat16 if autocast and multiplies_bfloat16() else torch.float32
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.module = copy.deepcopy(model, memo=shared)
        self._layers: list[PackedLinear] = []
        for parent in list(self.module.modules()):
            if type(parent).__name__ == "ParamWrapper":  # peft's, which gives its layer another weight for each pass
                continue
            for name, child in list(parent.named_children()):
                if type(child) in (nn.Linear, WideLinear):
                    self._layers.append(PackedLinear(child, self.products))
                    setattr(parent, name, self._layers[-1])
        self.update()

    def update(self) -> None:
        """Take up the model's weights as they are now."""
        for layer in self._layers:
            layer.pack()


class PackedLinear(nn.Module):  # type: ignore[misc]
    """An `nn.Linear` whose weight is packed when it is told to; without gradient."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = dtype
        self._in_blocks = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()

    def pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().to(self._dtype), _ROWS)
        self._shift = None if self.bias is None else self.bias.detach().to(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        given = inputs.to(self._dtype)
        outputs = self._product_in_blocks(given) if self._in_blocks else self._product(given)
        return outputs.to(inputs.dtype)

    def _product(self, inputs: Tensor) -> Tensor:
        if self._dtype == torch.bfloat16 and inputs.numel() == self.in_features:
            # Without bfloat16 instructions, oneDNN sums a single row in another order than two.
            rows = inputs.view(1, -1).expand(2, -1).contiguous()
            return linear_product(rows, self._packed, self._shift)[:1].view(*inputs.shape[:-1], -1)
        return linear_product(inputs, self._packed, self._shift)

    def _product_in_blocks(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, -2)
        if len(rows) == _ROWS:
            return self._product(inputs)
        blocks = pad(rows, (0, 0, 0, -len(rows) % _ROWS)).split(_ROWS)
        outputs = torch.cat([self._product(block) for block in blocks])[: len(rows)]
        return outputs.view(*inputs.shape[:-1], -1)
