"""Frozen linear layers in four or eight bits (QLoRA; Dettmers et al. 2023, arXiv:2305.14314).

A quantized weight is dequantized to the number format that it had for each product, forwards and backwards, so the
model computes what a model with the dequantized weights computes. int8 has one scale for each row, as in LLM.int8()
(arXiv:2208.07339), and nf4 one for each 64 numbers, without a second quantization of the scales.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rllm._runtime.process import return_memory
from rllm.errors import ConfigError, MissingDependencyError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization: TypeAlias = Literal["nf4", "int8"]

_BLOCK = 64
"""Numbers of a weight in nf4 that share a scale."""
_LARGEST = 127
"""Largest number in eight bits."""
_PIECE = 2**16
"""Numbers in nf4 that are dequantized at a time."""


def bitsandbytes_for(setting: str, device: torch.device) -> Any:
    """Return the package bitsandbytes, tried out; raise `ConfigError` if it does not run on the device."""
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise MissingDependencyError.of("bitsandbytes", "quantize", setting) from error
    weight = nn.Parameter(torch.ones(4096, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        bitsandbytes.functional.dequantize_4bit(*bitsandbytes.functional.quantize_4bit(weight.detach()))
        bitsandbytes.optim.AdamW8bit([weight]).step()
    except Exception as error:  # it has other kernels for each kind of device, and they raise anything
        raise ConfigError(
            f"{setting}: bitsandbytes {bitsandbytes.__version__} does not run on {device.type} here; leave it out "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return bitsandbytes


class QuantizedLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with a frozen, quantized weight; gradients flow to its inputs only."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        """Quantize the weight of a layer; nf4 needs bitsandbytes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, self.dtype = kind, linear.weight.dtype
        codes, scales = (_to_nf4 if kind == "nf4" else _to_int8)(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [out, in], computed at each access."""
        return self.dequantized_in(torch.empty(0, dtype=self.dtype, device=self.codes.device))

    def dequantized_in(self, memory: Tensor) -> Tensor:
        """Return the dequantized weight [out, in], in this memory, which grows if it is too small."""
        size = self.out_features * self.in_features
        if memory.numel() < size:
            memory.resize_(size)
        flat = memory[:size]
        if self.kind == "int8":
            return flat.view(self.out_features, self.in_features).copy_(self.codes).mul_(self.scales)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        codes = self.codes.view(-1)
        for start in range(0, size, _PIECE):
            part = flat[start : start + _PIECE]
            # As one row: on CPUs, bitsandbytes 0.50 takes each row to begin a block.
            shape = torch.Size((1, len(part)))
            scales = self.scales[start // _BLOCK : -(-(start + len(part)) // _BLOCK)]
            state = QuantState(scales, shape=shape, blocksize=_BLOCK, quant_type="nf4", dtype=self.dtype)
            part.copy_(dequantize_4bit(codes[start // 2 : -(-(start + len(part)) // 2), None], state).view(-1))
        return flat.view(self.out_features, self.in_features)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Product.apply(inputs, self)
        return outputs


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [out, in] and scales [out, 1]."""
    scales = weight.float().abs().amax(1, keepdim=True) / _LARGEST
    return (weight / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round().to(torch.int8), scales


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, two numbers in each byte, and scales, one for each block of the flattened weight."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=_BLOCK, quant_type="nf4")
    return codes, state.absmax


def dequantized_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that a model computes with, by the names of an ordinary model, without adapter, on the CPU."""
    quantized = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    parts = {f"{name}.{part}" for name in quantized for part in ("codes", "scales")}
    kept = {name: weight for name, weight in model.state_dict().items() if ".lora_" not in name and name not in parts}
    weights = {**kept, **{f"{name}.weight": layer.weight for name, layer in quantized.items()}}
    return {name.replace(".base_layer", ""): weight.cpu() for name, weight in weights.items()}


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """Product with a quantized weight, which is dequantized again for the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, dequantized(layer), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ dequantized(ctx.layer).to(gradient.dtype), None


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}


_scratch = _Scratch()


def dequantized(layer: QuantizedLinear) -> Tensor:
    """Return a layer's weight in memory that the next one of this thread overwrites.

    In memory of its own, each would lie between activations or packed weights that are kept, and leave a gap of its
    size there.
    """
    kind = layer.codes.device, layer.dtype
    if kind not in _scratch.memory:
        _scratch.memory[kind] = torch.empty(0, dtype=layer.dtype, device=layer.codes.device)
    return layer.dequantized_in(_scratch.memory[kind])


def quantize(model: PreTrainedModel, kind: Quantization, device: torch.device) -> float:
    """Quantize the frozen linear layers of a model on a device, layer by layer; the output head stays.

    Returns:
        The fraction of the model's numbers that is quantized.

    Raises:
        ConfigError: if there are no such layers, or if bitsandbytes does not run on the device.
        MissingDependencyError: for nf4 without bitsandbytes.
    """
    if kind == "nf4":
        bitsandbytes_for("model.quantize='nf4'", device)
    total: int = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    num_quantized, head = 0, model.get_output_embeddings().weight
    for parent in list(model.modules()):
        if type(parent).__name__ == "ParamWrapper":  # peft's, which changes its layer's weight for each pass
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad and child.weight is not head:
                num_quantized += child.in_features * child.out_features
                setattr(parent, name, QuantizedLinear(child.to(device), kind))
                return_memory()
    if not num_quantized:
        raise ConfigError(f"model.quantize={kind!r}: {type(model).__name__} has no linear layers; leave it out")
    for weight in model.parameters():
        weight.data = weight.data.clone()  # a part of the mapped file would keep all of it in memory
    return num_quantized / total
