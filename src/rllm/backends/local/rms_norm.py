"""Root mean square normalisation (Zhang and Sennrich 2019) in half the passes over memory that its separate operations take.

`transformers` writes it as five operations, each of which keeps a tensor for its gradient. On a CPU they are a tenth of a small
model's update. Here the gradient is one formula, for which the normalised input is kept and nothing else of its size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def use_quick_norms(model: nn.Module) -> None:
    """Let a model on a CPU normalise in this way, wherever it gives what its own modules give.

    Autocast then rounds normalised hidden states once, and not in each of the products that read them.
    """
    hidden_size = getattr(getattr(model, "config", None), "hidden_size", None)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, QuickRMSNorm) and _is_plain(child):
                is_of_states = len(child.weight) == hidden_size
                setattr(parent, name, QuickRMSNorm(child.weight, child.variance_epsilon, rounds=is_of_states))


def _is_plain(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and isinstance(eps, float)):
        return False
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64) or weight.ndim != 1:
        return False
    with torch.no_grad():  # there are norms of this name with a bias, or with a weight that begins at 0
        inputs = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype).view(2, -1)
        return bool(torch.allclose(module(inputs), QuickRMSNorm(weight, eps)(inputs), rtol=1e-5, atol=1e-6))


class QuickRMSNorm(nn.Module):  # type: ignore[misc]
    """weight * x / sqrt(mean(x ** 2) + eps), over the last dimension.

    With `rounds` it is given in autocast's format, inside of that.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, rounds: bool = False) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps
        self._rounds = rounds

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _RMSNorm.apply(inputs, self.weight, self.variance_epsilon)
        if self._rounds and torch.is_autocast_enabled("cpu"):
            return outputs.to(torch.get_autocast_dtype("cpu"))
        return outputs


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]
    """With n = x / rms and g the gradient of w * n: that of x is (gw - n * mean(gw * n)) / rms, that of w is sum(g * n)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        precise = inputs.to(weight.dtype)
        squares = torch.linalg.vector_norm(precise, dim=-1, keepdim=True).square_()
        inverse = squares.div_(inputs.shape[-1]).add_(eps).rsqrt_()
        normed = precise * inverse
        ctx.dtype = inputs.dtype
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, inverse, weight = ctx.saved_tensors
        [gradient] = gradients
        of_weight = of_inputs = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.linalg.vecdot(gradient.flatten(0, -2), normed.flatten(0, -2), dim=0)
        if ctx.needs_input_grad[0]:
            weighted = gradient * weight
            mean = torch.linalg.vecdot(weighted, normed).unsqueeze(-1) / normed.shape[-1]
            of_inputs = weighted.addcmul_(normed, mean, value=-1).mul_(inverse).to(ctx.dtype)
        return of_inputs, of_weight, None
