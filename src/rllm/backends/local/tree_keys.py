"""Keys and values over a token tree, handed to a model as the past of whichever rows it runs next.

Shapes: b rows of one pass, L tokens of its longest row, A tokens above it, n real tokens of it, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rllm.backends.local.rows import Stem
from rllm.backends.local.stem_attention import attend_with_stems


class TreeKeys:
    """What the passes so far have computed, layer by layer."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # per layer [tokens so far, H, D]
        self._values: list[Tensor] = []

    def past_of(self, ancestors: Tensor | None, stems: Sequence[Stem], kept: Tensor) -> PassKeys:
        """The past of the next pass.

        Args:
            ancestors: [b, A] where the tokens above each row lie among the tokens so far; `None` above roots and in stems.
            stems: of all rows or of none, with places among the tokens so far.
            kept: [n] which of the pass's b * L tokens are real.
        """
        return PassKeys(tuple(self._keys), tuple(self._values), ancestors, stems, kept)

    def take_in(self, done: PassKeys) -> None:
        """Append what a pass has computed."""
        self._keys = _appended(self._keys, done.new_keys)
        self._values = _appended(self._values, done.new_values)


class PassKeys(Cache):  # type: ignore[misc]
    """One pass's view of the tree. It never changes what is above, so a layer may be run again for the backward pass."""

    def __init__(
        self,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        ancestors: Tensor | None,
        stems: Sequence[Stem],
        kept: Tensor,
    ) -> None:
        super().__init__(layers=[])
        self._keys, self._values = keys, values
        self._ancestors, self._stems, self._kept = ancestors, stems, kept
        self.new_keys: dict[int, Tensor] = {}  # by layer [n, H, D]
        self.new_values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep [b, H, L, D] of this pass, and return it behind the gathered [b, H, A, D] of the passes before."""
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
        """[b, H, L, D] attention to a row's own tokens and to its stem; see `attend_with_stems`."""
        stems = [
            (_of_stem(self._keys[layer], stem, query.dtype), _of_stem(self._values[layer], stem, query.dtype))
            for stem in self._stems
        ]
        return attend_with_stems(query, keys, values, mask, stems, [stem.num_rows for stem in self._stems], scale)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._ancestors is None else self._ancestors.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and which is the first: for models that are given no mask, to make their own."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _of_stem(states: Tensor, stem: Stem, dtype: torch.dtype) -> Tensor:
    """[1, H, A, D]"""
    return states.index_select(0, stem.tokens).transpose(0, 1).unsqueeze(0).to(dtype)


def _appended(store: list[Tensor], new: dict[int, Tensor]) -> list[Tensor]:
    if not store:
        return [new[layer] for layer in range(len(new))]
    return [torch.cat([states, new[layer]]) for layer, states in enumerate(store)]
