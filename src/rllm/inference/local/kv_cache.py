"""Keys and values: of the sequences being decoded, one slot each, and of prefixes for later prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Self

import torch
from transformers import Cache

_READ_STEP, _READ_STEP_OF_GPU = 32, 256
"""Reads are padded to a multiple of this many columns, so that views, and on a GPU graphs, are seldom made again."""
_SPARE = 8
"""Columns in use for each spare one. More spare columns would make reading slower: they separate the slots, and
separated memory takes up to twice as long to read."""
_FIRST_SLOTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Size of the states of one token."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def numbers_per_token(self) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        return self.numbers_per_token * int(self.dtype.itemsize)


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values by slot and column, in one growable tensor; column c of a slot holds its c-th token.

    On a CPU the tensor is part of one as large as the cache may become: main memory is only taken where it is written
    to, so the cache grows without a second copy of it. A GPU's memory is taken as a whole, so it grows by doubling.

    The sequences in progress fill the first slots, so a decode step reads a plain slice. `aim` selects the slots of
    a forward pass; the model then calls `update` once a layer.
    """

    def __init__(self, shape: CacheShape, *, max_slots: int, max_columns: int, max_bytes: int) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self._max_slots = max_slots
        self._read_step = _READ_STEP if shape.device.type == "cpu" else _READ_STEP_OF_GPU
        self._max_columns = self._whole_steps(max_columns)
        self._max_tokens = max(1, max_bytes // shape.bytes_per_token)
        self.release()

    def release(self) -> None:
        """Forget all slots and free their memory."""
        self._memory = torch.empty(0, dtype=self.shape.dtype, device=self.shape.device)
        self._num_written = 0
        self._lay_out(0, 0)

    def _lay_out(self, slots: int, columns: int) -> None:
        shape = self.shape
        sizes = (shape.num_layers, 2, slots, shape.num_heads, columns, shape.head_dim)
        needed = prod(sizes)
        if len(self._memory) < needed:
            most = self._max_tokens * shape.numbers_per_token
            reserved = most if shape.device.type == "cpu" else min(_power_of_two(needed), most)
            self._memory = torch.empty(max(needed, reserved), dtype=shape.dtype, device=shape.device)
            self._num_written = 0
        # Masked columns have weight 0, and 0 * NaN is NaN.
        self._memory[self._num_written : needed].zero_()
        self._num_written = max(self._num_written, needed)
        self.states = self._memory[:needed].view(sizes)  # [layer, key or value, slot, head, column, dim]
        self._flat = [[self.states[layer, kind].view(-1, shape.head_dim) for kind in (0, 1)] for layer in self._layers]
        heads = torch.arange(slots * shape.num_heads, device=shape.device).view(slots, shape.num_heads)
        self._first_row = heads * columns  # [slot, head]: index of column 0 in a flat view
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._viewed = (-1, -1, -1)
        self._rows = heads

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        taken = self._num_written if self.shape.device.type == "cpu" else len(self._memory)
        return taken * int(self.shape.dtype.itemsize)

    @property
    def _layers(self) -> range:
        return range(self.shape.num_layers)

    @property
    def num_slots(self) -> int:
        return int(self.states.shape[2])

    @property
    def num_columns(self) -> int:
        return int(self.states.shape[4])

    def fits(self, slots: int, columns: int) -> bool:
        """Return whether this many sequences of this length fit into the cache's memory."""
        return slots * columns <= self._max_tokens

    def reserve(self, slots: int, columns: int, used_slots: int) -> bool:
        """Make room for this many slots and columns, keeping the first `used_slots`; return whether the tensor moved.

        The number of columns may shrink, so `columns` must include those in use.
        """
        wanted_columns = min(
            self._whole_steps(columns + columns // _SPARE), max(self._max_columns, self._whole_steps(columns))
        )
        is_enough = slots <= self.num_slots and columns <= self.num_columns
        if is_enough and (used_slots or self.num_columns <= wanted_columns):
            return False
        wanted_slots = max(self.num_slots, min(_power_of_two(slots, _FIRST_SLOTS), max(self._max_slots, slots)))
        if not self.fits(wanted_slots, wanted_columns):
            wanted_slots, wanted_columns = slots, self._whole_steps(columns)
        used, before = min(self.num_columns, wanted_columns), self.states
        self._lay_out(wanted_slots, wanted_columns)
        # Layer by layer, since both layouts are in the same memory: a layer's new place is free once the layers that
        # overlap it have moved.
        is_larger = self.states.stride(0) > before.stride(0)
        for layer in reversed(self._layers) if is_larger else self._layers:
            held = before[layer, :, :used_slots, :, :used].clone()
            self.states[layer, :, :used_slots, :, :used] = held
        return True

    def num_read(self, columns: int) -> int:
        """Return how many columns a forward pass reads that needs this many."""
        return min(self._whole_steps(columns), self.num_columns)

    def _whole_steps(self, columns: int) -> int:
        return -(-columns // self._read_step) * self._read_step

    def aim(self, first_slot: int, num_slots: int, columns: torch.Tensor, num_read: int) -> int:
        """Aim the next forward pass at slots from `first_slot` on, and return how many columns it reads.

        It writes `columns` [num_slots, T] of each slot and reads the first `num_read` columns, rounded up.
        """
        num_read = self.num_read(num_read)
        stop = first_slot + num_slots
        self._rows = (self._first_row[first_slot:stop].unsqueeze(2) + columns.unsqueeze(1)).view(-1)
        if self._viewed != (first_slot, stop, num_read):
            self._viewed = (first_slot, stop, num_read)
            read = self.states[:, :, first_slot:stop, :, :num_read]
            self._views = [(read[layer, 0], read[layer, 1]) for layer in self._layers]
        return num_read

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [slots, heads, T, dim], and return those to attend to."""
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self._rows, key_states.reshape(-1, key_states.shape[-1]))
        values.index_copy_(0, self._rows, value_states.reshape(-1, value_states.shape[-1]))
        return self._views[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns read. Positions and masks are explicit, so models only test whether it is 0."""
        return max(self._viewed[2], 0)


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


BLOCK = 8
"""Tokens of a block of the prefix cache; at most `BLOCK - 1` shared tokens are computed again."""
_COPIED = 1 << 26
"""Bytes of blocks copied at a time; the copy takes as much memory again."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A node of the prefix tree."""

    index: int
    """Index in the pool; -1 for the root."""
    tokens: tuple[int, ...] = ()
    parent: PrefixNode | None = None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    ready: bool = False
    """True if its states are stored; a block is made before the forward pass that computes them."""
    used: int = 0
    """Last round in which it was matched or made."""


class BlockLocation(NamedTuple):
    """Location of a block's states in a slot cache."""

    block: PrefixNode
    slot: int
    number: int
    """Number of blocks before it in the slot."""

    @classmethod
    def of(cls, blocks: Sequence[PrefixNode], slot: int, first: int = 0) -> list[Self]:
        """Return the locations of consecutive blocks, the first of which is number `first` of the slot."""
        return [cls(block, slot, number) for number, block in enumerate(blocks, start=first)]


class PrefixCache:
    """Keys and values of prefixes computed before: siblings of a group and later turns start from them.

    Prefixes form a tree of blocks, each with the states of the `BLOCK` tokens that follow its parent's. Blocks live
    in one pool [block, layer, key or value, head, BLOCK, dim] and are evicted least recently used first, children
    before parents.
    """

    def __init__(self, shape: CacheShape, *, max_bytes: int) -> None:
        self._max_blocks = max_bytes // (shape.bytes_per_token * BLOCK)
        self._shape = shape
        self._round = 0
        self.release()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use."""
        return len(self._by_use) * BLOCK * self._shape.bytes_per_token

    def release(self) -> None:
        """Forget everything, and free its memory; an unused pool takes none."""
        # All at once: main memory is only taken where it is written to, and a GPU's cannot grow in place.
        shape = self._shape
        size = (self._max_blocks, shape.num_layers, 2, shape.num_heads, BLOCK, shape.head_dim)
        self._pool = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._root = PrefixNode(index=-1, ready=True)
        # A path is touched from its end to its start, so the first block here never has children.
        self._by_use: OrderedDict[PrefixNode, None] = OrderedDict()

    def begin_round(self) -> None:
        """Keep whatever is matched or made from here on until the next round begins."""
        self._round += 1

    def match(self, ids: Sequence[int]) -> list[PrefixNode]:
        """Return the longest path of blocks that `ids` starts with; the last ones may not be ready yet."""
        path: list[PrefixNode] = []
        node = self._root
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            child = node.children.get(tuple(ids[start : start + BLOCK]))
            if child is None:
                break
            path.append(child)
            node = child
        self._touch(path)
        return path

    def extend(self, ids: Sequence[int], path: list[PrefixNode]) -> list[PrefixNode]:
        """Make and return the blocks of `ids` beyond `path`; fewer where the pool is full."""
        node = path[-1] if path else self._root
        made: list[PrefixNode] = []
        for start in range(len(path) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            index = self._take_index()
            if index is None:
                break
            child = PrefixNode(index, tuple(ids[start : start + BLOCK]), parent=node, used=self._round)
            node.children[child.tokens] = child
            self._by_use[child] = None
            made.append(child)
            node = child
        self._touch([*path, *made])
        return made

    def load(self, locations: Sequence[BlockLocation], states: torch.Tensor) -> None:
        """Copy blocks to their locations in `states` [layer, key or value, slot, head, column, dim]."""
        for indices, slots, numbers in self._indices(locations):
            _in_blocks(states)[:, :, slots, :, numbers] = self._pool.index_select(0, indices)

    def store(self, locations: Sequence[BlockLocation], states: torch.Tensor) -> None:
        """Copy blocks from their locations in `states`, which are as for `load`."""
        for indices, slots, numbers in self._indices(locations):
            self._pool.index_copy_(0, indices, _in_blocks(states)[:, :, slots, :, numbers])
        for location in locations:
            location.block.ready = True

    def _indices(self, locations: Sequence[BlockLocation]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the indices of some blocks in the pool, of slots, and of blocks within these."""
        table = [(spot.block.index, spot.slot, spot.number) for spot in locations]
        number = max(_COPIED // (BLOCK * self._shape.bytes_per_token), 1)
        for start in range(0, len(table), number):
            yield torch.tensor(table[start : start + number], device=self._pool.device).unbind(1)

    def _touch(self, path: list[PrefixNode]) -> None:
        for block in reversed(path):
            block.used = self._round
            self._by_use.move_to_end(block)

    def _take_index(self) -> int | None:
        """Return a free index of the pool, or the index of the least recently used block; `None` if all are in use."""
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
    """View [layer, key or value, slot, head, column, dim] as [layer, key or value, slot, head, block, BLOCK, dim]."""
    whole = states.shape[4] // BLOCK
    return states[:, :, :, :, : whole * BLOCK].unflatten(4, (whole, BLOCK))
