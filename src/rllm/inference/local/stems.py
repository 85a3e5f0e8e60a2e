"""Attention to prompts that several sequences share: their keys are read once for all of them, not once for each.

Reading keys is what decoding spends most of its time on when prompts are long, and a group of rollouts has one prompt. A
*stem* holds its keys and values; each sequence keeps only those of its own tokens, attends to both apart, and joins the two
results by their log-sum-exp (as in Juravsky et al. 2024, Hydragen).

Shapes: B sequences of a batch, n of those that share a stem, G key heads, Q queries for each of them, D head size, P tokens
of a stem, L columns of own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

ROWS = 16
"""On a CPU, attention of a multiple of so many queries to the same keys comes out the same, bit for bit, however many queries there
are. Fewer are summed in another order on some CPUs, from a head size of 96 on below 8 and from 256 on below 12."""


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences that share a stem."""

    states: Tensor  # [layer, key or value, G, P, D]
    members: list[int]
    """Their numbers in the batch."""


class StemAttention:
    """What the sequences of a batch share; made anew when the batch changes."""

    def __init__(self, groups: Sequence[Group], num_queries: int) -> None:
        num_layers = len(groups[0].states)
        self._keys = [[group.states[layer, :1] for group in groups] for layer in range(num_layers)]  # [1, G, P, D] each
        self._values = [[group.states[layer, 1:] for group in groups] for layer in range(num_layers)]
        padded: list[int] = []
        real: list[int] = []
        self._sizes: list[int] = []  # of each group, in queries
        for group in groups:
            padding = -len(group.members) % (ROWS // gcd(ROWS, num_queries))
            real += range(len(padded), len(padded) + len(group.members))
            padded += group.members + group.members[:1] * padding
            self._sizes.append((len(group.members) + padding) * num_queries)
        self._padded, self._real = torch.tensor(padded), torch.tensor(real)
        self._members = self._padded[self._real]

    def attend(
        self,
        layer: int,
        query: Tensor,  # [B, G, Q, D]
        keys: Tensor,  # [B, G, L, D]
        values: Tensor,  # [B, G, L, D]
        mask: Tensor,  # [B, 1, 1, L]
        scale: float,
    ) -> Tensor:
        """[B, G, Q, D] the attention to a sequence's own keys and to its stem's, where it has one."""
        own, own_total = _attend(query, keys, values, mask, scale)
        rows = query.transpose(0, 1).index_select(1, self._padded).flatten(1, 2).unsqueeze(0).split(self._sizes, dim=2)
        parts = [
            _attend(part, keys, values, None, scale)
            for part, keys, values in zip(rows, self._keys[layer], self._values[layer], strict=True)
        ]
        out, total = (self._by_member(torch.cat(pieces, dim=2), query) for pieces in zip(*parts, strict=True))
        # The share of the stem's keys in the sum over all: a sigmoid, which rounds in the middle of a tensor otherwise than at
        # the end of a thread's part. These operations do not.
        share = (own_total.index_select(0, self._members) - total).exp_().add_(1).reciprocal_().unsqueeze(-1)
        joined = torch.lerp(own.index_select(0, self._members), out, share)
        return own.index_copy(0, self._members, joined)

    def _by_member(self, stacked: Tensor, query: Tensor) -> Tensor:
        """What was computed for the padded members, [1, G, queries, ...], as [n, G, Q, ...]."""
        return stacked[0].unflatten(1, (-1, query.shape[2])).index_select(1, self._real).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The operation behind `scaled_dot_product_attention` on a CPU, which gives the log-sum-exp too."""
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scale
    )
    return out, total
