"""How many of the programs that oneDNN makes for shapes of products a process keeps.

It makes one for each shape, and keeps 1,024; torch's binding keeps as many descriptions of them. The batches of a trainer differ in
shape from step to step, so that a small model's training with autocast came to hold 0.7 GB of programs that it never ran again. Of
one step it needs fewer than a hundred, whatever the number of layers.
"""

from __future__ import annotations

import os
from functools import cache

import torch

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN, and of torch's binding to it. Both are read once, by the first product, and the second by the first of each kind."""
_KEPT = "128"


@cache
def keep_few_kernels() -> None:
    """Let this process keep few, unless its environment says how many, or a product was computed before."""
    chosen = [name for name in _VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(chosen, _KEPT))
    try:
        some = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(some, some)
        if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            torch.ops.mkldnn._linear_pointwise(some.float(), some.float(), None, "none", [], "")
    finally:  # what this process starts decides for itself
        for name in chosen:
            del os.environ[name]
