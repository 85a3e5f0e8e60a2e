"""Slots keep their contents whenever the cache is laid out again, and lie close together."""

from __future__ import annotations

import random

import pytest
import torch

from rllm.inference.local.kv_cache import CacheShape, SlotCache

SHAPE = CacheShape(num_layers=2, num_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def cache_of(max_tokens: int = 100_000) -> SlotCache:
    return SlotCache(SHAPE, max_slots=16, max_columns=1_000, max_bytes=max_tokens * SHAPE.bytes_per_token)


@pytest.mark.parametrize("max_tokens", [100_000, 3_000])
def test_cached_states_are_kept_while_slots_and_columns_change(max_tokens: int) -> None:
    rng, cache = random.Random(0), cache_of(max_tokens)
    held: list[torch.Tensor] = []  # by slot
    num_columns = set()
    for _ in range(300):
        held = held[: rng.randint(0, len(held))]
        longest = max([1, *(states.shape[3] for states in held)])
        slots, columns = rng.randint(max(len(held), 1), 12), max(longest, rng.choice([5, 40, 100, 200]))
        cache.reserve(slots, columns, len(held))
        num_columns.add(cache.num_columns)
        assert cache.states.isfinite().all()
        assert cache.num_slots >= slots
        assert cache.num_columns >= columns
        for slot, states in enumerate(held):
            assert torch.equal(cache.states[:, :, slot, :, : states.shape[3]], states)
        for slot in range(len(held), slots):
            held.append(torch.randn(2, 2, 2, columns, 4))
            cache.states[:, :, slot, :, :columns] = held[-1]
    assert len(num_columns) > 3
    assert cache.nbytes <= max_tokens * SHAPE.bytes_per_token


def test_columns_shrink_after_long_sequences() -> None:
    cache = cache_of()
    cache.reserve(4, 900, 0)
    assert 900 <= cache.num_columns < 1.3 * 900
    cache.reserve(4, 20, 1)
    assert cache.num_columns >= 900  # one slot is in use
    cache.reserve(4, 20, 0)
    assert cache.num_columns == 32


def test_single_added_columns_rarely_move_the_cache() -> None:
    cache = cache_of()
    cache.reserve(4, 1, 0)
    assert sum(cache.reserve(4, columns, 4) for columns in range(1, 1_001)) < 25
    assert cache.num_columns < 1_100


def test_cache_grows_without_a_second_copy() -> None:
    cache = cache_of()
    cache.reserve(4, 1, 0)
    place = cache.states.data_ptr()
    for columns in range(100, 1_001, 100):
        cache.reserve(4, columns, 4)
        assert cache.states.data_ptr() == place
        assert cache.nbytes == cache.states.nbytes
    cache.release()
    assert cache.nbytes == 0
