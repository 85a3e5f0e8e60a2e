"""Attention within a token tree, row by row, with gradients.

Copied in front of each row, the keys of a group's long prompt would take more memory than anything else, and be kept
for the backward pass. So rows attend to their own keys and to their *shared prefix*'s keys separately, and the two
results are joined by their log-sum-exp (Juravsky et al. 2024, Hydragen). In the backward pass each part is
independent: its probabilities are the exponentials of its scores less the sum over all keys, and the only other joint
quantity needed is the output (Dao et al. 2022, FlashAttention).

Shapes: T tokens of the tree, b rows of one block, L tokens of its longest row, A tokens above it or in a shared prefix,
H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention

from rllm.algorithms.tree import ROW_TOKENS, TokenTree
from rllm.backends.local.tree_rows import AttentionBlock, blocks

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RowAttention:
    """Attention within a tree whose tokens are one sequence; a `TreeAttention` of training."""

    def __init__(
        self,
        tree: TokenTree,
        device: torch.device,
        *,
        row_tokens: int = ROW_TOKENS,
        shared_saved: int | None = None,
    ) -> None:
        """Cut the tree into rows; see `tree_rows.blocks`."""
        self._blocks = list(blocks(tree, row_tokens, shared_saved))
        queries = [block.tokens.flatten() for block in self._blocks]
        keys = [tokens for block in self._blocks for tokens in _keys_of(block)]
        self._num_queries, self._num_keys = [len(tokens) for tokens in queries], [len(tokens) for tokens in keys]
        is_real = torch.cat([block.is_real.flatten() for block in self._blocks])
        place = torch.empty(len(tree.ids), dtype=torch.long)
        place[torch.cat(queries)[is_real]] = is_real.nonzero().flatten()
        self._queries, self._place = torch.cat(queries).to(device), place.to(device)
        self._keys = torch.cat(keys).to(device)
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,  # [1, H, T, D]
        keys: Tensor,  # [1, G, T, D]
        values: Tensor,  # [1, G, T, D]
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return [1, H, T, D] the attention's output."""
        queries = _selected(query, self._queries).split(self._num_queries)
        # One selection of all keys: each would have a gradient of the size of the tree.
        pairs = zip(*(_selected(states, self._keys).split(self._num_keys) for states in (keys, values)), strict=True)
        pieces = []
        for block, rows, seen in zip(self._blocks, queries, self._additive_masks(query), strict=True):
            own_keys, own_values = (_as_rows(states, len(block.tokens)) for states in next(pairs))
            own_query = _as_rows(rows, len(block.tokens))
            if block.shared:
                shared = [tuple(_as_rows(states, 1) for states in next(pairs)) for _ in block.shared]
                sizes = [prefix.num_rows for prefix in block.shared]
                out = attend_to_shared(own_query, own_keys, own_values, seen, shared, sizes, scale)
            else:
                out = scaled_dot_product_attention(
                    own_query, own_keys, own_values, seen, is_causal=seen is None, scale=scale, enable_gqa=True
                )
            pieces.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(pieces).index_select(0, self._place).transpose(0, 1).unsqueeze(0)

    def _additive_masks(self, like: Tensor) -> list[Tensor | None]:
        """Return the mask of each block as numbers that are added to scores, which all layers share."""
        if like.dtype not in self._masks:
            self._masks[like.dtype] = [
                None
                if block.mask is None
                else torch.zeros(block.mask.shape, dtype=like.dtype)
                .masked_fill_(~block.mask, -torch.inf)
                .to(like.device)
                for block in self._blocks
            ]
        return self._masks[like.dtype]


def _keys_of(block: AttentionBlock) -> list[Tensor]:
    """Return the positions in the tree of the keys of a block's rows, and of each shared prefix."""
    own = block.tokens if block.above is None else torch.cat([block.above, block.tokens], dim=1)
    return [own.flatten(), *(prefix.tokens for prefix in block.shared)]


def _selected(states: Tensor, tokens: Tensor) -> Tensor:
    """Return [tokens, heads, D] the states of these tokens, from [1, heads, T, D]."""
    return states[0].transpose(0, 1).index_select(0, tokens)


def _as_rows(states: Tensor, num_rows: int) -> Tensor:
    """Return [b, heads, length, D] from [b * length, heads, D]."""
    return states.unflatten(0, (num_rows, -1)).transpose(1, 2)


def attend_to_shared(
    query: Tensor,  # [b, H, L, D]
    keys: Tensor,  # [b, G, L, D]
    values: Tensor,  # [b, G, L, D]
    mask: Tensor | None,  # [b, 1, L, L], added to the scores; None: causal
    shared: Sequence[tuple[Tensor, Tensor]],  # keys and values, [1, G, A, D] each
    num_rows: Sequence[int],  # of each prefix; together b
    scale: float,
) -> Tensor:
    """Return [b, H, L, D] attention to a row's own tokens and to all of its shared prefix. On a CPU."""
    sizes = [number * query.shape[2] for number in num_rows]
    flat = [tensor for prefix in shared for tensor in prefix]
    output: Tensor = _SharedAttention.apply(query, keys, values, mask, scale, sizes, *flat)
    return output


class _SharedAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        sizes: list[int],
        *shared: Tensor,
    ) -> Tensor:
        out, total = _attend(query, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale)
        queries = _stacked(query).split(sizes, dim=2)
        parts = [
            _attend(part, keys, values, scale=scale)
            for part, keys, values in zip(queries, shared[::2], shared[1::2], strict=True)
        ]
        shared_out, shared_total = (torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))
        shared_total = _apart(shared_total.unsqueeze(-1), len(query)).squeeze(-1)
        fraction = torch.sigmoid(shared_total - total).unsqueeze(-1)
        out = out.lerp_(_apart(shared_out, len(query)), fraction)
        ctx.save_for_backward(query, keys, values, mask, out, torch.logaddexp(total, shared_total), *shared)
        ctx.scale, ctx.sizes = scale, sizes
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mask, out, total, *shared = ctx.saved_tensors
        [gradient] = gradients
        of_query, of_keys, of_values = _attend_backward(
            gradient, query, keys, values, out, total, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        stacked = (_stacked(each).split(ctx.sizes, dim=2) for each in (gradient, query, out, total.unsqueeze(-1)))
        of_queries, of_shared = [], []
        for part, prefix_keys, prefix_values in zip(zip(*stacked, strict=True), shared[::2], shared[1::2], strict=True):
            part_gradient, part_query, part_out, part_total = part
            of_part, *of_prefix = _attend_backward(
                part_gradient,
                part_query,
                prefix_keys,
                prefix_values,
                part_out,
                part_total.squeeze(-1),
                0.0,
                False,
                scale=ctx.scale,
            )
            of_queries.append(of_part)
            of_shared += of_prefix
        of_query += _apart(torch.cat(of_queries, dim=2), len(query))
        return of_query, of_keys, of_values, None, None, None, *of_shared


def _stacked(rows: Tensor) -> Tensor:
    """Return [b, H, L, D] as the rows of one sequence, [1, H, b * L, D]."""
    return rows.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _apart(stacked: Tensor, num_rows: int) -> Tensor:
    """Return [1, H, b * L, D] as [b, H, L, D]."""
    return stacked[0].transpose(0, 1).unflatten(0, (num_rows, -1)).transpose(1, 2)
