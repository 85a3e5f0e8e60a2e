"""Attention to keys that several rows share, read where they are by all of these rows at once, with its gradients.

Copied in front of each row, the keys of a group's long prompt would take more memory than anything else, and be kept for the
backward pass. So rows attend to their own keys and to those of their *stem* apart, and the two are joined by their
log-sum-exp (Juravsky et al. 2024, Hydragen). Backwards each part is on its own: its probabilities are the exponentials of
its scores less the sum over all keys, and what else is needed of all is the outcome (Dao et al. 2022, FlashAttention).

Shapes: b rows of L tokens, H query heads, G key heads, D head size; A tokens of a stem, above n of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_with_stems(
    query: Tensor,  # [b, H, L, D]
    keys: Tensor,  # [b, G, L, D]
    values: Tensor,  # [b, G, L, D]
    mask: Tensor | None,  # [b, 1, L, L] bool, who may attend to whom; None: each token to those before it
    stems: Sequence[tuple[Tensor, Tensor]],  # keys and values, [1, G, A, D] each
    num_rows: Sequence[int],  # of each stem; together b
    scale: float,
) -> Tensor:
    """[b, H, L, D] attention to a row's own tokens and to all of its stem. On a CPU."""
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    sizes = [number * query.shape[2] for number in num_rows]
    flat = [tensor for stem in stems for tensor in stem]
    outcome: Tensor = _StemAttention.apply(query, keys, values, mask, scale, sizes, *flat)
    return outcome


class _StemAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        sizes: list[int],
        *stems: Tensor,
    ) -> Tensor:
        out, total = _attend(query, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale)
        queries = _stacked(query).split(sizes, dim=2)
        parts = [
            _attend(part, keys, values, scale=scale)
            for part, keys, values in zip(queries, stems[::2], stems[1::2], strict=True)
        ]
        stem_out, stem_total = (torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))
        stem_total = _apart(stem_total.unsqueeze(-1), len(query)).squeeze(-1)
        share = torch.sigmoid(stem_total - total).unsqueeze(-1)
        out = out.lerp_(_apart(stem_out, len(query)), share)
        ctx.save_for_backward(query, keys, values, mask, out, torch.logaddexp(total, stem_total), *stems)
        ctx.scale, ctx.sizes = scale, sizes
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mask, out, total, *stems = ctx.saved_tensors
        [gradient] = gradients
        of_query, of_keys, of_values = _attend_backward(
            gradient, query, keys, values, out, total, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        stacked = (_stacked(each).split(ctx.sizes, dim=2) for each in (gradient, query, out, total.unsqueeze(-1)))
        of_queries, of_stems = [], []
        for part, stem_keys, stem_values in zip(zip(*stacked, strict=True), stems[::2], stems[1::2], strict=True):
            part_gradient, part_query, part_out, part_total = part
            of_part, *of_stem = _attend_backward(
                part_gradient,
                part_query,
                stem_keys,
                stem_values,
                part_out,
                part_total.squeeze(-1),
                0.0,
                False,
                scale=ctx.scale,
            )
            of_queries.append(of_part)
            of_stems += of_stem
        of_query += _apart(torch.cat(of_queries, dim=2), len(query))
        return of_query, of_keys, of_values, None, None, None, *of_stems


def _stacked(rows: Tensor) -> Tensor:
    """[b, H, L, D] as the rows of one sequence, [1, H, b * L, D]."""
    return rows.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _apart(stacked: Tensor, num_rows: int) -> Tensor:
    """[1, H, b * L, D] as [b, H, L, D]."""
    return stacked[0].transpose(0, 1).unflatten(0, (num_rows, -1)).transpose(1, 2)
