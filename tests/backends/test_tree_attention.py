from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rllm.backends.local.tree_attention import attend_to_shared

NUM_ROWS, STEM_LENGTHS = [3, 1], [5, 70]
ROWS, LENGTH, SIZE = sum(NUM_ROWS), 40, 8


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def with_copied_prefix(own: Tensor, prefixes: list[Tensor], mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, for each row, the keys of its prefix before its own, and the mask of attention."""
    prefix_of_row = [prefix for prefix, number in zip(prefixes, NUM_ROWS, strict=True) for _ in range(number)]
    return [
        (torch.cat([prefix, row.unsqueeze(0)], dim=2), torch.cat([mask.new_ones(LENGTH, prefix.shape[2]), mask], dim=1))
        for row, prefix in zip(own, prefix_of_row, strict=True)
    ]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("is_forked", [False, True], ids=["causal", "a tree of its own"])
def test_shared_prefix_attention_equals_attention_to_copies(heads: int, groups: int, is_forked: bool) -> None:
    query = random(ROWS, LENGTH, heads, SIZE, seed=1)  # in the layout of a model
    keys, values = random(ROWS, groups, LENGTH, SIZE, seed=2), random(ROWS, groups, LENGTH, SIZE, seed=3)
    stem_keys = [random(1, groups, length, SIZE, seed=10 + length) for length in STEM_LENGTHS]
    stem_values = [random(1, groups, length, SIZE, seed=20 + length) for length in STEM_LENGTHS]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if is_forked:
        mask[20:, 10:20] = False
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    inputs = [query, keys, values, *stem_keys, *stem_values]
    pull = random(ROWS, heads, LENGTH, SIZE, seed=4).detach()

    found = attend_to_shared(
        query.transpose(1, 2),
        keys,
        values,
        added.expand(ROWS, 1, LENGTH, LENGTH) if is_forked else None,
        list(zip(stem_keys, stem_values, strict=True)),
        NUM_ROWS,
        scale=0.3,
    )
    rows = zip(
        query.transpose(1, 2).split(1),
        with_copied_prefix(keys, stem_keys, mask),
        with_copied_prefix(values, stem_values, mask),
        strict=True,
    )
    expected = torch.cat(
        [
            scaled_dot_product_attention(one, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
            for one, (key, seen), (value, _) in rows
        ]
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for one, other in zip(
        torch.autograd.grad(found, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_distant_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, SIZE), 100.0)
    keys, values = torch.full((1, 1, 2, SIZE), -100.0), torch.zeros(1, 1, 2, SIZE)
    prefix = (torch.full((1, 1, 3, SIZE), 100.0), torch.ones(1, 1, 3, SIZE))
    found = attend_to_shared(query, keys, values, None, [prefix], [1], scale=1.0)
    torch.testing.assert_close(found, torch.ones(1, 1, 2, SIZE))
