"""A CPU copy of a model, with packed weights, whose results for one row do not depend on other rows.

torch's float32 products sum in an order that depends on the number of rows, so a sampled token would depend on what is
decoded with it, and a resumed run would differ from an uninterrupted one. oneDNN's products of packed weights do
not, and take about as long (less than half in bfloat16). Weights are packed when they are first used after an update,
and dropped while the next one runs.

Intel's matrix units (AMX), which multiply bfloat16, do depend on the number of rows, so there all products have
`_ROWS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from rllm._runtime.process import total_memory
from rllm.inference.local.quantized import QuantizedLinear, dequantized

_ROWS = 64
"""Number of rows that a layout is chosen for; it serves any other, too."""
SHARE_OF_MEMORY = 8
"""Weights are packed if they take at most an eighth of the main memory that this process may use."""
_ACTIVATIONS = {nn.SiLU, *(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())}
_SHARE = 2**15
"""Least number of elements that torch gives to each thread in elementwise operations."""
_VECTOR = 64
"""Largest number of elements processed at a time."""


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether the model is in float32 on a CPU with oneDNN, and small enough for a second copy."""
    linear = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    size = sum(layer.in_features * layer.out_features * torch.float32.itemsize for layer in linear)
    return (
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and size * SHARE_OF_MEMORY <= total_memory()
    )


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU, which most without AVX512 do not."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedModel:
    """A copy of a model that multiplies by packed weights; it shares all its tensors with the model."""

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False) -> None:
        """Pack the model; with `autocast`, products are in bfloat16 where the CPU can."""
        self.products = torch.bfloat16 if autocast and multiplies_bfloat16() else torch.float32
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.module = copy.deepcopy(model, memo=shared)
        self._layers: list[PackedLinear] = []
        for parent in list(self.module.modules()):
            if type(parent).__name__ == "ParamWrapper":  # peft's, which changes its layer's weight for each pass
                continue
            for name, child in list(parent.named_children()):
                if type(child) in (nn.Linear, QuantizedLinear):
                    self._layers.append(PackedLinear(child, self.products))
                    setattr(parent, name, self._layers[-1])
                elif type(child) in _ACTIVATIONS:
                    setattr(parent, name, RowwiseActivation(child))

    def drop(self) -> None:
        """Free the packed weights; the next forward pass packs the model's weights as they are then."""
        for layer in self._layers:
            layer.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(layer.nbytes for layer in self._layers)


class PackedLinear(nn.Module):  # type: ignore[misc]
    """An `nn.Linear`, quantized or not, with a packed weight; without gradient."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = dtype
        self._in_blocks = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._packed: Tensor | None = None

    def drop(self) -> None:
        """Free the packed weight, because the weight will change."""
        self._packed = None

    @property
    def weight(self) -> Tensor:
        """Weight of the layer, which some models read."""
        return self.linear.weight

    @property
    def nbytes(self) -> int:
        return 0 if self._packed is None else self.in_features * self.out_features * self._dtype.itemsize

    def forward(self, inputs: Tensor) -> Tensor:
        if self._packed is None:
            linear, bias = self.linear, self.linear.bias
            weight = dequantized(linear) if isinstance(linear, QuantizedLinear) else linear.weight
            self._shift = None if bias is None else bias.detach().to(self._dtype)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self._dtype), _ROWS)
        given = inputs.to(self._dtype)
        outputs = self._product_in_blocks(given) if self._in_blocks else self._product(given)
        return outputs.to(inputs.dtype)

    def _product(self, inputs: Tensor) -> Tensor:
        if self._dtype == torch.bfloat16 and inputs.numel() == self.in_features:
            # Without bfloat16 instructions, oneDNN sums a single row in another order than two.
            rows = inputs.view(1, -1).expand(2, -1).contiguous()
            return self._product(rows)[:1].view(*inputs.shape[:-1], -1)
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._shift, "none", [], "")
        return outputs

    def _product_in_blocks(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if len(rows) == _ROWS:
            return self._product(inputs)
        blocks = pad(rows, (0, 0, 0, -len(rows) % _ROWS)).split(_ROWS)
        outputs = torch.cat([self._product(block) for block in blocks])[: len(rows)]
        return outputs.view(*inputs.shape[:-1], -1)


class RowwiseActivation(nn.Module):  # type: ignore[misc]
    """Activation whose result for a row is the same, bit for bit, whatever other rows there are.

    torch works in vectors, but element by element at the end of each thread's share, where SiLU rounds differently.
    Here, no thread's share has such an end.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, states: Tensor) -> Tensor:
        size, num_threads = states.numel(), torch.get_num_threads()
        if size % _VECTOR == 0 and (size <= _SHARE or num_threads == 1):
            return self._function(states)
        flat = states.reshape(-1)
        outputs = torch.empty_like(flat)
        whole = size - size % _VECTOR
        in_shares = whole - whole % _SHARE
        step = _SHARE * num_threads
        for start, stop in ((0, in_shares), (in_shares, whole)):
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                outputs[begin:end] = self._function(flat[begin:end])
        if whole < size:
            outputs[whole:] = self._function(pad(flat[whole:], (0, whole + _VECTOR - size)))[: size - whole]
        return outputs.view(states.shape)
