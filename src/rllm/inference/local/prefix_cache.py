"""Keys and values of token prefixes that were computed before: siblings of a group and later turns start from them.

Prefixes form a tree of blocks; a block holds the states of `BLOCK` tokens that follow its parent's. Blocks live in one
pool and are given up least recently used first, children before parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def load(self, path: Sequence[Block], target: torch.Tensor) -> None:
        """Copy a path's states into the start of a slot, `target` [layer, key or value, head, column, dim]."""
        if path:
            blocks = self._pool.index_select(0, self._indices(path))
            start = target[:, :, :, : len(path) * BLOCK].unflatten(3, (len(path), BLOCK))
            start.copy_(blocks.permute(1, 2, 3, 0, 4, 5))

    def store(self, blocks: Sequence[Block], first: int, source: torch.Tensor) -> None:
        """Copy the states of consecutive blocks, the first of which is number `first` of its path, out of a slot."""
        if blocks:
            states = source[:, :, :, first * BLOCK : (first + len(blocks)) * BLOCK].unflatten(3, (len(blocks), BLOCK))
            self._pool.index_copy_(0, self._indices(blocks), states.permute(3, 0, 1, 2, 4, 5))
            for block in blocks:
                block.ready = True

    def _indices(self, blocks: Sequence[Block]) -> torch.Tensor:
        return torch.tensor([block.index for block in blocks], device=self._pool.device)

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
