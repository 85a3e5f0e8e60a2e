"""The key-value cache of the sequences being decoded: one slot a sequence, all slots in one growable tensor.

The sequences in progress always fill the first slots, so that a decode step reads a plain slice of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import Cache

_READ_STEP = 32
"""Reads are padded to a multiple of this many columns, so that the slices are made anew only now and then."""
_SPARE = 8
"""One in so many columns is spare, and fewer than a read step where there are few: a slot with columns that nobody reads yet lies
apart from the next one, and what lies apart in memory takes up to twice as long to read."""
_FIRST_SLOTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What one token of one sequence occupies."""

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
    """Keys and values by slot and column; column c of a slot holds the token at position c.

    A forward pass first says which slots it is about (`aim`); the model then calls `update` once a layer.
    """

    def __init__(self, shape: CacheShape, *, max_slots: int, max_columns: int, max_bytes: int) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self._max_slots = max_slots
        self._max_columns = _whole_steps(max_columns)
        self._max_tokens = max(1, max_bytes // shape.bytes_per_token)
        self._memory = torch.zeros(0, dtype=shape.dtype, device=shape.device)
        self._lay_out(0, 0)

    def _lay_out(self, slots: int, columns: int) -> None:
        shape = self.shape
        sizes = (shape.num_layers, 2, slots, shape.num_heads, columns, shape.head_dim)
        needed = prod(sizes)
        if len(self._memory) < needed:
            most = self._max_tokens * shape.numbers_per_token
            # Zeros and not empty memory: masked columns have weight 0, and 0 * NaN is NaN.
            self._memory = torch.zeros(
                max(needed, min(_power_of_two(needed), most)), dtype=shape.dtype, device=shape.device
            )
        self.states = self._memory[:needed].view(sizes)  # [layer, key or value, slot, head, column, dim]
        self._flat = [[self.states[layer, kind].view(-1, shape.head_dim) for kind in (0, 1)] for layer in self._layers]
        heads = torch.arange(slots * shape.num_heads, device=shape.device).view(slots, shape.num_heads)
        self._first_row = heads * columns  # [slot, head]: where column 0 lies in a flat view
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._viewed = (-1, -1, -1)
        self._rows = heads

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
        """Whether this many sequences of this length stay within the memory that the cache may use."""
        return slots * columns <= self._max_tokens

    def reserve(self, slots: int, columns: int, used_slots: int) -> bool:
        """Make room for this many slots and columns, keeping the first `used_slots`; returns whether it moved.

        There may be fewer columns afterwards, so `columns` must count those that are in use.
        """
        wanted_columns = min(_whole_steps(columns + columns // _SPARE), max(self._max_columns, _whole_steps(columns)))
        is_enough = slots <= self.num_slots and columns <= self.num_columns
        if is_enough and (used_slots or self.num_columns <= wanted_columns):
            return False
        wanted_slots = max(self.num_slots, min(_power_of_two(slots, _FIRST_SLOTS), max(self._max_slots, slots)))
        if not self.fits(wanted_slots, wanted_columns):
            wanted_slots, wanted_columns = slots, _whole_steps(columns)
        memory, used = self._memory, min(self.num_columns, wanted_columns)
        held = self.states[:, :, :used_slots, :, :used]
        self._lay_out(wanted_slots, wanted_columns)
        self.states[:, :, :used_slots, :, :used] = held.clone() if self._memory is memory else held
        return True

    def aim(self, first_slot: int, num_slots: int, columns: torch.Tensor, num_read: int) -> int:
        """Point the next forward pass at slots `first_slot...`: it writes `columns` [num_slots, T] of each and reads
        the first `num_read` columns, rounded up; returns how many those are."""
        num_read = min(_whole_steps(num_read), self.num_columns)
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
        """Store the new keys and values, [slots, heads, T, dim]; returns those to attend to."""
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self._rows, key_states.reshape(-1, key_states.shape[-1]))
        values.index_copy_(0, self._rows, value_states.reshape(-1, value_states.shape[-1]))
        return self._views[layer_idx]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of a slot over those of another."""
        self.states[:, :, target, :, :length] = self.states[:, :, source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of columns read. Positions and masks are given explicitly, so models only look whether it is 0."""
        return max(self._viewed[2], 0)


def _whole_steps(columns: int) -> int:
    return -(-columns // _READ_STEP) * _READ_STEP


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())
