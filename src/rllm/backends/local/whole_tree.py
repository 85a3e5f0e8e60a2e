"""The training forward pass where FlexAttention is fast, on CUDA: the whole token tree as one sequence, in one pass.

A token attends to those before it whose subtree has not ended, as within a row of `rows.py`. FlexAttention (Dong et al.
2024) is told this as a block mask: it skips blocks of pairs in which nobody may attend to anybody, and never writes the
scores down, so that nothing is copied and no row has to be short.

Shapes: T tokens of the tree, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from rllm.algorithms.tree import TokenTree
from rllm.backends.local.last_mlp import last_mlp, only_for
from rllm.backends.local.rows import depths_and_stops

_BLOCK = 128
"""Tokens of a block."""
_KERNELS = 128
"""More than there are powers of two that a tree's length may be, for each kind of model in a process."""


def whole_tree_states(model: torch.nn.Module, tree: TokenTree, *, read: Tensor | None = None) -> Tensor:
    """The model's last hidden state of every token of the tree, or of those that `read` marks: [T, hidden size].

    For models whose attention takes `Above`.
    """
    device = next(model.parameters()).device
    depths, stops = depths_and_stops(tree)
    ids = torch.tensor([tree.ids], device=device)
    read_here = torch.arange(len(tree.ids)) if read is None else read.nonzero().flatten()
    mlp = None if read is None else last_mlp(model)
    with only_for(read_here.to(device), ids.shape, mlp):
        output = model(
            input_ids=ids,
            position_ids=depths.unsqueeze(0).to(device),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # taken as it is, and not read
            use_cache=False,
            above=_WithinTree(stops.to(device)),
        )
    states: Tensor = output.last_hidden_state[0]
    return states


class _WithinTree:
    """Attention within a tree; see `Above`. Padding makes lengths powers of two, so that few kernels are compiled."""

    def __init__(self, stops: Tensor) -> None:
        """`stops`: [T] where the subtree of each token ends."""
        length = max(_BLOCK, 1 << (len(stops) - 1).bit_length())
        self._padding = length - len(stops)
        ends = torch.arange(1, length + 1, device=stops.device)  # padding sees itself
        ends[: len(stops)] = stops

        def sees(_batch: Tensor, _head: Tensor, token: Tensor, earlier: Tensor) -> Tensor:
            return (earlier <= token) & (token < ends[earlier])

        self._mask = BlockMask.from_kv_blocks(*_blocks(ends), BLOCK_SIZE=_BLOCK, mask_mod=sees)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [1, H, T, D]
        keys: Tensor,  # [1, G, T, D]
        values: Tensor,  # [1, G, T, D]
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """[1, H, T, D]"""
        # Under autocast, norms leave queries and keys in a wider format than values.
        padded = (pad(states.to(values.dtype), (0, 0, 0, self._padding)) for states in (query, keys, values))
        attention = compiled() if query.device.type == "cuda" else flex_attention
        outcome: Tensor = attention(*padded, block_mask=self._mask, scale=scale, enable_gqa=True)
        return outcome[:, :, : query.shape[2]]


def _blocks(ends: Tensor) -> tuple[Tensor, ...]:
    """How many blocks each block of tokens sees in part, and which; and how many as a whole, and which. As from
    `create_block_mask`, but not by way of all pairs of tokens. `ends` [T]: who is the first to see each token no more."""
    first = torch.arange(0, len(ends), _BLOCK, device=ends.device)
    of_block = ends.view(-1, _BLOCK)
    earlier = first < first.unsqueeze(1)  # [block, block seen]
    whole = earlier & (of_block.amin(1) >= first.unsqueeze(1) + _BLOCK)
    part = earlier & (of_block.amax(1) > first.unsqueeze(1)) & ~whole
    part.fill_diagonal_(True)
    return tuple(number for seen in (part, whole) for number in _ordered(seen[None, None]))


def _ordered(seen: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, n] how many blocks are seen by each, and [1, 1, n, n] these before all others."""
    return seen.sum(-1, dtype=torch.int32), seen.int().argsort(dim=-1, descending=True, stable=True).int()


@cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> Any:
    """FlexAttention with kernels of its own for each length, with gradients and without.

    PyTorch makes eight, and then writes all scores down.
    """
    attention = torch.compile(flex_attention, dynamic=False, backend=backend)
    return torch._dynamo.config.patch(recompile_limit=_KERNELS)(attention)
