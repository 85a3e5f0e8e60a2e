"""Keys and values of token prefixes that were computed before: siblings of a group and later turns start from them.

Prefixes form a tree of blocks; a block holds the states of `BLOCK` tokens that follow its parent's. Blocks live in one
pool and are given up least recently used first, children before parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from rllm.inference.local.kv_cache import CacheShape

BLOCK = 8
"""Tokens a block; at most `BLOCK - 1` shared tokens are computed again."""


@dataclass(eq=False, slots=True)
class Block:
    """One node of the tree."""

    index: int
    """Its place in the pool; -1 for the root."""
    tokens: tuple[int, ...] = ()
    parent: Block | None = None
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    ready: bool = False
    """Whether its states have been stored; a block is made before the forward pass that computes them."""
    used: int = 0
    """The last round in which it was matched or made."""


class Place(NamedTuple):
    """Where a block's states lie in a cache of slots."""

    block: Block
    slot: int
    number: int
    """How many blocks stand before it in the slot."""

    @classmethod
    def of(cls, blocks: Sequence[Block], slot: int, first: int = 0) -> list[Self]:
        """Those of consecutive blocks, the first of which is number `first` of its slot."""
        return [cls(block, slot, number) for number, block in enumerate(blocks, start=first)]


class PrefixCache:
    """The tree, and the pool of states [block, layer, key or value, head, BLOCK, dim]."""

    def __init__(self, shape: CacheShape, *, max_bytes: int) -> None:
        self._max_blocks = max_bytes // (shape.bytes_per_token * BLOCK)
        # All of it at once: main memory is only taken where it is written to, and a GPU's cannot be grown in place.
        self._pool = torch.empty(
            (self._max_blocks, shape.num_layers, 2, shape.num_heads, BLOCK, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )
        self._round = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self._root = Block(index=-1, ready=True)
        # A path is touched from its end to its start, so the first block here never has children.
        self._by_use: OrderedDict[Block, None] = OrderedDict()

    def begin_round(self) -> None:
        """Whatever is matched or made from here on is kept until the next round begins."""
        self._round += 1

    def match(self, ids: Sequence[int]) -> list[Block]:
        """The longest path of known blocks that `ids` starts with; the last ones may not be ready yet."""
        path: list[Block] = []
        node = self._root
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            child = node.children.get(tuple(ids[start : start + BLOCK]))
            if child is None:
                break
            path.append(child)
            node = child
        self._touch(path)
        return path

    def extend(self, ids: Sequence[int], path: list[Block]) -> list[Block]:
        """Make the blocks of `ids` that lie beyond `path`; returns those made (fewer where the pool is full)."""
        node = path[-1] if path else self._root
        made: list[Block] = []
        for start in range(len(path) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            index = self._take_index()
            if index is None:
                break
            child = Block(index, tuple(ids[start : start + BLOCK]), parent=node, used=self._round)
            node.children[child.tokens] = child
            self._by_use[child] = None
            made.append(child)
            node = child
        self._touch([*path, *made])
        return made

    def load(self, places: Sequence[Place], states: torch.Tensor) -> None:
        """Copy blocks to their places in `states` [layer, key or value, slot, head, column, dim]."""
        if places:
            indices, slots, numbers = self._indices(places)
            _in_blocks(states)[:, :, slots, :, numbers] = self._pool.index_select(0, indices)

    def store(self, places: Sequence[Place], states: torch.Tensor) -> None:
        """Copy blocks from their places in `states`, which are as for `load`."""
        if places:
            indices, slots, numbers = self._indices(places)
            self._pool.index_copy_(0, indices, _in_blocks(states)[:, :, slots, :, numbers])
            for place in places:
                place.block.ready = True

    def _indices(self, places: Sequence[Place]) -> tuple[torch.Tensor, ...]:
        """Of blocks in the pool, of slots, and of blocks in these."""
        table = [(place.block.index, place.slot, place.number) for place in places]
        columns: tuple[torch.Tensor, ...] = torch.tensor(table, device=self._pool.device).unbind(1)
        return columns

    def _touch(self, path: list[Block]) -> None:
        for block in reversed(path):
            block.used = self._round
            self._by_use.move_to_end(block)

    def _take_index(self) -> int | None:
        """A free place in the pool, or that of the block that was not used for the longest time."""
        if len(self._by_use) < self._max_blocks:
            return len(self._by_use)
        oldest = next(iter(self._by_use), None)
        if oldest is None or oldest.used == self._round:
            return None
        assert oldest.parent is not None
        assert not oldest.children
        del self._by_use[oldest], oldest.parent.children[oldest.tokens]
        return oldest.index


def _in_blocks(states: torch.Tensor) -> torch.Tensor:
    """[layer, key or value, slot, head, column, dim] as [layer, key or value, slot, head, block, BLOCK, dim]."""
    whole = states.shape[4] // BLOCK
    return states[:, :, :, :, : whole * BLOCK].unflatten(4, (whole, BLOCK))
