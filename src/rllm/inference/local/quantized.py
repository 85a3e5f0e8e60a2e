"""Frozen linear layers in four or eight bits (QLoRA; Dettmers et al. 2023, arXiv:2305.14314).

A quantised weight is dequantised to the number format that it had for each product, forwards and backwards, so the
model computes what a model with the dequantised weights computes. int8 has one scale for each row, as in LLM.int8()
(arXiv:2208.07339), and nf4 one for each 64 numbers, without a second quantisation of the scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rllm.errors import ConfigError, MissingDependencyError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Quantization: TypeAlias = Literal["nf4", "int8"]

_BLOCK = 64
"""Numbers of a weight in nf4 that share a scale."""
_LARGEST = 127
"""Largest number in eight bits."""


def bitsandbytes_for(setting: str, device: torch.device) -> Any:
    """Return the package bitsandbytes, tried out on the device.

    Raises:
        ConfigError: if it does not run there.
        MissingDependencyError: if it is not installed.
    """
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


def check_quantizable(config: PretrainedConfig, source: str, kind: str) -> None:
    """Check that a model's weights are not quantised yet, given its Hugging Face configuration.

    Raises:
        ConfigError: if they are.
    """
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method", "an unknown method")
        raise ConfigError(
            f"model.quantize={kind!r}: the weights of model.path={source!r} are quantised already ({method}); leave "
            "model.quantize out, or use the model that is not quantised"
        )


class QuantizedLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with a frozen, quantised weight; gradients flow to its inputs only."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        """Quantise the weight of a layer; nf4 needs bitsandbytes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, self._dtype = kind, linear.weight.dtype
        codes, scales = (_to_nf4 if kind == "nf4" else _to_int8)(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], computed at each access."""
        if self.kind == "int8":
            return (self.codes * self.scales).to(self._dtype)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        # As one row: on CPUs, bitsandbytes 0.50 takes each row to begin a block.
        shape = torch.Size((1, self.out_features * self.in_features))
        state = QuantState(self.scales, shape=shape, blocksize=_BLOCK, quant_type="nf4", dtype=self._dtype)
        weight: Tensor = dequantize_4bit(self.codes, state)
        return weight.view(self.out_features, self.in_features)

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
    """Return what a model computes with, without its adapter, by the names of an ordinary model, in main memory."""
    quantized = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    parts = {f"{name}.{part}" for name in quantized for part in ("codes", "scales")}
    kept = {name: weight for name, weight in model.state_dict().items() if ".lora_" not in name and name not in parts}
    weights = {**kept, **{f"{name}.weight": layer.weight for name, layer in quantized.items()}}
    return {name.replace(".base_layer", ""): weight.cpu() for name, weight in weights.items()}


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """Product with a quantised weight, which is dequantised again for the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


def quantize(model: PreTrainedModel, kind: Quantization, device: torch.device) -> float:
    """Quantise the frozen linear layers of a model on a device, layer by layer; the output head stays.

    Returns:
        The fraction of the model's numbers that is quantised.

    Raises:
        ConfigError: if there are no such layers, if the weights are quantised already, or if bitsandbytes does not run
            on the device.
        MissingDependencyError: for nf4 without bitsandbytes.
    """
    check_quantizable(model.config, model.name_or_path, kind)
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
    if not num_quantized:
        raise ConfigError(f"model.quantize={kind!r}: {type(model).__name__} has no linear layers; leave it out")
    for weight in model.parameters():
        weight.data = weight.data.clone()  # a part of the mapped file would keep all of it in memory
    return num_quantized / total
