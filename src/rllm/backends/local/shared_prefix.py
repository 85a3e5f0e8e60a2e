"""Keys and values over a token tree, and attention to prefixes that several rows share, with gradients.

Copied in front of each row, the keys of a group's long prompt would take more memory than anything else, and be kept
for the backward pass. So rows attend to their own keys and to those of their *shared prefix* separately, and the two
results are joined by their log-sum-exp (Juravsky et al. 2024, Hydragen). In the backward pass each part is
independent: its probabilities are the exponentials of its scores less the sum over all keys, and the only other joint
quantity needed is the output (Dao et al. 2022, FlashAttention).

Shapes: b rows of one pass, L tokens of its longest row, A tokens above it or in a shared prefix, n real tokens of the
pass, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers.cache_utils import Cache

from rllm.backends.local.tree_rows import SharedPrefix

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeKeys:
    """Keys and values that the passes so far have computed, layer by layer."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # per layer [tokens so far, H, D]
        self._values: list[Tensor] = []

    def past_of(self, ancestors: Tensor | None, shared: Sequence[SharedPrefix], kept: Tensor) -> PassKeys:
        """Return the past of the next pass.

        Args:
            ancestors: [b, A] positions among the tokens so far of those above each row; `None` above roots and if
            shared.
            shared: prefixes of all rows or of none, with positions among the tokens so far.
            kept: [n] indices of the real tokens among the pass's b * L.
        """
        return PassKeys(tuple(self._keys), tuple(self._values), ancestors, shared, kept)

    def add(self, done: PassKeys) -> None:
        """Append the keys and values of a pass."""
        self._keys = _appended(self._keys, done.new_keys)
        self._values = _appended(self._values, done.new_values)


class PassKeys(Cache):  # type: ignore[misc]
    """One pass's view of the tree, given to a model as its cache.

    It never changes what is above, so a layer may be run again for the backward pass.
    """

    def __init__(
        self,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        ancestors: Tensor | None,
        shared: Sequence[SharedPrefix],
        kept: Tensor,
    ) -> None:
        super().__init__(layers=[])
        self._keys, self._values = keys, values
        self._ancestors, self._shared, self._kept = ancestors, shared, kept
        self.new_keys: dict[int, Tensor] = {}  # by layer [n, H, D]
        self.new_values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep [b, H, L, D] of this pass, and return it after the gathered [b, H, A, D] of earlier passes."""
        return (
            self._extend(self._keys, self.new_keys, key_states, layer_idx),
            self._extend(self._values, self.new_values, value_states, layer_idx),
        )

    def _extend(self, above: tuple[Tensor, ...], new: dict[int, Tensor], states: Tensor, layer: int) -> Tensor:
        real = states.transpose(1, 2).flatten(0, 1).index_select(0, self._kept)  # [n, H, D]
        new.setdefault(layer, real)
        if self._ancestors is None:
            return states
        gathered = above[layer].index_select(0, self._ancestors.flatten())
        gathered = gathered.view(*self._ancestors.shape, *gathered.shape[1:]).transpose(1, 2)  # [b, H, A, D]
        return torch.cat([gathered, states], dim=2)

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Return [b, H, L, D] attention to a row's own tokens and its shared prefix; see `attend_to_shared`."""
        shared = [
            (_of_prefix(self._keys[layer], prefix, query.dtype), _of_prefix(self._values[layer], prefix, query.dtype))
            for prefix in self._shared
        ]
        num_rows = [prefix.num_rows for prefix in self._shared]
        return attend_to_shared(query, keys, values, mask, shared, num_rows, scale)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._ancestors is None else self._ancestors.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the first of them, for models that make their own mask."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _of_prefix(states: Tensor, prefix: SharedPrefix, dtype: torch.dtype) -> Tensor:
    """Return [1, H, A, D] the states of a shared prefix."""
    return states.index_select(0, prefix.tokens).transpose(0, 1).unsqueeze(0).to(dtype)


def _appended(store: list[Tensor], new: dict[int, Tensor]) -> list[Tensor]:
    if not store:
        return [new[layer] for layer in range(len(new))]
    return [torch.cat([states, new[layer]]) for layer, states in enumerate(store)]


def attend_to_shared(
    query: Tensor,  # [b, H, L, D]
    keys: Tensor,  # [b, G, L, D]
    values: Tensor,  # [b, G, L, D]
    mask: Tensor | None,  # [b, 1, L, L] bool; None: causal
    shared: Sequence[tuple[Tensor, Tensor]],  # keys and values, [1, G, A, D] each
    num_rows: Sequence[int],  # of each prefix; together b
    scale: float,
) -> Tensor:
    """Return [b, H, L, D] attention to a row's own tokens and to all of its shared prefix. On a CPU."""
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
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
