"""The training forward pass where FlexAttention is fast, on CUDA: the whole token tree as one sequence, in one pass.

A token attends to those before it whose subtree has not ended, as within a row of `rows.py`. FlexAttention (Dong et al.
2024) is told this as a block mask: it skips blocks of pairs in which nobody may attend to anybody, and never writes the
scores down, so that nothing is copied and no row has to be short.

Shapes: T tokens of the tree, rounded up to whole blocks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad

from rllm.algorithms.tree import TokenTree
from rllm.backends.local.last_mlp import last_mlp, only_for
from rllm.backends.local.rows import depths_and_stops

_BLOCK = 128
"""Tokens of a block; lengths are whole blocks, so that kernels are compiled for few of them."""


def whole_tree_states(model: torch.nn.Module, tree: TokenTree, *, read: Tensor | None = None) -> Tensor:
    """The model's last hidden state of every token of the tree, or of those that `read` marks: [T, hidden size].

    For models whose attention takes `Above`.
    """
    device = next(model.parameters()).device
    num_tokens = len(tree.ids)
    padding = -num_tokens % _BLOCK
    depths, stops = depths_and_stops(tree)
    ids, depths, stops = (
        pad(values, (0, padding)).unsqueeze(0).to(device) for values in (torch.tensor(tree.ids), depths, stops)
    )
    stops[:, num_tokens:] = num_tokens + padding  # padding sees padding
    read_here = torch.arange(num_tokens) if read is None else read.nonzero().flatten()
    mlp = None if read is None else last_mlp(model)
    with nullcontext() if mlp is None else only_for(read_here.to(device), ids.shape, mlp):
        output = model(
            input_ids=ids,
            position_ids=depths,
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # taken as it is, and not read
            use_cache=False,
            above=_InTree(stops[0], num_tokens),
        )
    states: Tensor = output.last_hidden_state[0, :num_tokens]
    return states


class _InTree:
    """Attention within a tree; see `Above`."""

    def __init__(self, stops: Tensor, num_tokens: int) -> None:
        """`stops`: [T] where the subtree of each token ends; from `num_tokens` on they are padding."""
        length = len(stops)

        def sees(_batch: Tensor, _head: Tensor, token: Tensor, earlier: Tensor) -> Tensor:
            return (earlier <= token) & (token < stops[earlier])

        self._mask: BlockMask = create_block_mask(sees, None, None, length, length, device=stops.device)

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        dtype = values.dtype  # under autocast, norms leave queries and keys in a wider one
        attention = _compiled() if query.device.type == "cuda" else flex_attention
        outcome: Tensor = attention(
            query.to(dtype), keys.to(dtype), values, block_mask=self._mask, scale=scale, enable_gqa=True
        )
        return outcome


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
