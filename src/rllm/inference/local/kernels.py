"""oneDNN's products of linear layers, and how many of the programs that it makes for their shapes a process keeps.

It makes one for each shape, and keeps 1,024; torch's binding keeps as many descriptions of them. The batches of a trainer differ in
shape from step to step, so that a small model's training with autocast came to hold 0.7 GB of programs that it never ran again. Of
one step it needs fewer than a hundred, whatever the number of layers.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN, and of torch's binding to it. Both are read once, by the first product, and the second by the first of each kind."""
_KEPT = "128"


def has_linear_products() -> bool:
    """Whether this torch has them on this machine."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., N] of inputs [..., K], a weight [N, K], which may be packed, and a bias [N]; without gradient."""
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return outputs


@cache
def keep_few_kernels() -> None:
    """Let this process keep few, unless its environment says how many, or a product was computed before."""
    chosen = [name for name in _VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(chosen, _KEPT))
    try:
        some = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(some, some)
        if has_linear_products():
            linear_product(some.float(), some.float())
    finally:  # what this process starts decides for itself
        for name in chosen:
            del os.environ[name]
