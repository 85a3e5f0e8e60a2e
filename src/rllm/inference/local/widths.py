"""How many columns attention on a CPU may read, so that a row comes out the same, bit for bit, however long the others are.

Its kernel sums over `SUMMED` columns at a time. Fewer of them, in the last of these blocks, may be summed in parts that depend on
their number, and which numbers those are depends on the CPU: 193 to 383 on some, 385 to 511 on others, 257 to 511 with the kernels of
AVX2. So it is tried.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

SUMMED = 512
STEP = 32
"""Widths are multiples of it."""


def even_width(columns: int, *, queries: int, head_dim: int) -> int:
    """The least number of columns, from `columns` on, over which attention of so many queries to each key is summed as over more."""
    blocks, rest = divmod(columns, SUMMED)
    return blocks * SUMMED + (next(width for width in _even_widths(queries, head_dim) if width >= rest) if rest else 0)


@cache
def _even_widths(queries: int, head_dim: int) -> tuple[int, ...]:
    """The widths up to a block that give what a whole block gives where the rest of it is hidden; ascending, the block is last."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(1, 1, length, head_dim, generator=generator) for length in (queries, SUMMED, SUMMED)
    )

    def attend(width: int, num_seen: int) -> torch.Tensor:
        hidden = torch.zeros(1, 1, 1, width)
        hidden[..., num_seen:] = -torch.inf
        return scaled_dot_product_attention(query, keys[:, :, :width], values[:, :, :width], attn_mask=hidden)

    # Where the parts are others, it shows if all columns are seen; columns with weight 0 change no sum.
    with torch.no_grad():
        return tuple(
            width for width in range(STEP, SUMMED + 1, STEP) if attend(width, width).equal(attend(SUMMED, width))
        )
