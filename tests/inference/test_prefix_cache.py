from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.inference.local.kv_cache import BLOCK, BlockLocation, CacheShape, PrefixCache

SHAPE = CacheShape(num_layers=2, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))


def states_of(ids: list[int]) -> torch.Tensor:
    """Return fake states: [layer, kind, slot, head, column, dim], a function of the prefix alone."""
    running = torch.tensor(ids, dtype=torch.float32).cumsum(0)
    return running.view(1, 1, 1, 1, -1, 1).expand(2, 2, 1, 1, -1, 1).clone()


def remember(cache: PrefixCache, ids: list[int]) -> None:
    cache.begin_round()
    path = cache.match(ids)
    cache.store(BlockLocation.of(cache.extend(ids, path), 0, len(path)), states_of(ids))


def recall(cache: PrefixCache, ids: list[int]) -> torch.Tensor:
    path = cache.match(ids)
    target = torch.zeros(2, 2, 1, 1, len(ids), 1)
    cache.load(BlockLocation.of(path, 0), target)
    return target[:, :, :, :, : len(path) * BLOCK]


def cache_of(blocks: int) -> PrefixCache:
    return PrefixCache(SHAPE, max_bytes=blocks * BLOCK * SHAPE.bytes_per_token)


def test_stored_blocks_are_returned_one_by_one() -> None:
    cache = cache_of(100)
    ids = list(range(3 * BLOCK + 2))
    remember(cache, ids)
    assert recall(cache, ids).shape[4] == 3 * BLOCK
    assert torch.equal(recall(cache, ids), states_of(ids)[:, :, :, :, : 3 * BLOCK])
    assert recall(cache, ids[: 2 * BLOCK - 1]).shape[4] == BLOCK
    assert recall(cache, [9, *ids]).shape[4] == 0
    cache.clear()
    assert recall(cache, ids).shape[4] == 0


def test_least_recently_used_leaf_is_evicted_first() -> None:
    cache = cache_of(4)
    first, second = [1] * 2 * BLOCK, [2] * 2 * BLOCK
    remember(cache, first)
    remember(cache, second)
    cache.match(first)
    remember(cache, [3] * BLOCK)
    assert [recall(cache, ids).shape[4] for ids in (first, second)] == [2 * BLOCK, BLOCK]


def test_block_that_is_being_computed_is_not_ready() -> None:
    cache = cache_of(10)
    ids = [5] * 2 * BLOCK
    made = cache.extend(ids, [])
    assert [block.ready for block in cache.match(ids)] == [False, False]
    cache.store(BlockLocation.of(made, 0), states_of(ids))
    assert [block.ready for block in cache.match(ids)] == [True, True]


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=30), st.integers(0, 8))
def test_found_prefixes_are_correct(block_lists: list[list[int]], blocks: int) -> None:
    cache = cache_of(blocks)
    for kinds in block_lists:
        ids = [kind + 1 for kind in kinds for _ in range(BLOCK)]
        remember(cache, ids)
        found = recall(cache, ids)
        assert torch.equal(found, states_of(ids)[:, :, :, :, : found.shape[4]] if ids else found)
