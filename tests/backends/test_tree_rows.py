from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.tree import TokenTree, build_tree
from rllm.backends.local import tree_rows
from rllm.backends.local.tree_rows import Row, blocks, cut_rows

PROMPT = [1, 2, 3]
TWO_ANSWERS = [[*PROMPT, 4, 5], [*PROMPT, 6]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def test_siblings_in_a_row_are_masked_from_each_other() -> None:
    tree = build_tree(TWO_ANSWERS, min_saved=1)
    assert cut_rows(tree) == [Row(0, 6, parent=-1, num_above=0)]
    (only,) = blocks(tree)
    assert only.mask is not None
    assert only.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert only.mask.int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0, 0],
                [1, 1, 1, 1, 1, 0],
                [1, 1, 1, 0, 0, 1],
            ]
        ]
    ]


def test_tree_too_long_for_a_row_is_cut_at_a_fork() -> None:
    tree = build_tree(TWO_ANSWERS, min_saved=1)
    assert cut_rows(tree, 4) == [Row(0, 3, parent=-1, num_above=0), Row(3, 6, parent=0, num_above=3)]
    _, below = blocks(tree, 4)
    assert below.above is not None
    assert below.mask is not None
    assert below.above.tolist() == [[0, 1, 2]]
    assert below.tokens.tolist() == [[3, 4, 5]]
    assert below.mask.int().tolist() == [[[[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]]]


def test_separate_sequences_need_no_mask() -> None:
    (only,) = blocks(build_tree([[1] * 90, [2] * 95]))
    assert only.tokens.shape == (2, 95)
    assert only.mask is None


def test_small_trees_share_a_row() -> None:
    rows = cut_rows(build_tree([[1] * 20, [2] * 20, [3] * 20, [4] * 20]))
    assert [(row.start, row.stop) for row in rows] == [(0, 60), (60, 80)]


def test_rows_of_very_different_length_do_not_pad_each_other() -> None:
    tree = build_tree([[1] * 60, [2] * 400, [3] * 62])
    assert [block.tokens.shape for block in blocks(tree)] == [(2, 62), (1, 400)]


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rows, "BLOCK_TOKENS", 20)
    tree = build_tree([[token] * 9 for token in range(6)])
    assert [block.tokens.shape for block in blocks(tree, 9)] == [(2, 9)] * 3


def test_rows_share_their_prefix_if_that_saves_enough() -> None:
    tree = build_tree([[*PROMPT, 4, 4], [*PROMPT, 5], [*PROMPT, 6], [7, 8, 8], [7, 9]], min_saved=1)
    *_, below = blocks(tree, 1, shared_saved=3)
    assert [(prefix.num_rows, prefix.tokens.tolist()) for prefix in below.shared] == [(3, [0, 1, 2]), (2, [7])]
    assert below.above is None
    ids = torch.tensor(tree.ids)
    assert ids[below.tokens].tolist() == [[5, 5], [6, 6], [4, 4], [9, 9], [8, 8]], "in the order of parents; padded"
    assert below.is_real[:, 1].tolist() == [False, False, True, False, True]
    assert below.mask is None, "below a shared prefix, each token sees those before it"
    *_, below = blocks(tree, 1, shared_saved=4)
    assert not below.shared, "2 * 3 + 1 tokens are saved, less than 4 for each of two prefixes"


def seen_by_token(tree: TokenTree, row_tokens: int, shared_saved: int | None) -> dict[int, list[int]]:
    """Return the tokens that each token of the tree attends to, read from the blocks."""
    seen: dict[int, list[int]] = {}
    for block in blocks(tree, row_tokens, shared_saved):
        num_rows, length = block.tokens.shape
        keys = block.tokens if block.above is None else torch.cat([block.above, block.tokens], dim=1)
        causal = torch.ones(num_rows, 1, length, length, dtype=torch.bool).tril()
        mask = causal if block.mask is None else block.mask
        shared = [prefix.tokens.tolist() for prefix in block.shared for _ in range(prefix.num_rows)] or [[]] * num_rows
        for row, place in block.is_real.nonzero().tolist():
            token = int(block.tokens[row, place])
            assert token not in seen, "each token is in one row"
            seen[token] = sorted([*shared[row], *keys[row][mask[row, 0, place]].tolist()])
    return seen


@given(SEQUENCES, st.integers(1, 20), st.sampled_from([1, 4, 16, 64]), st.sampled_from([None, 1]))
def test_each_token_attends_only_to_its_own_prefix(
    sequences: list[list[int]], min_saved: int, row_tokens: int, shared_saved: int | None
) -> None:
    tree = build_tree(sequences, min_saved=min_saved)
    expected = {
        token: sorted(positions[: place + 1])
        for positions in map(tree.positions, range(len(sequences)))
        for place, token in enumerate(positions)
    }
    assert seen_by_token(tree, row_tokens, shared_saved) == expected
