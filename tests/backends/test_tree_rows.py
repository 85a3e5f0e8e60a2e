from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.tree import TokenTree, build_tree
from rllm.backends.local import tree_rows
from rllm.backends.local.tree_rows import Row, cut_rows, passes

PROMPT = [1, 2, 3]
TWO_ANSWERS = [[*PROMPT, 4, 5], [*PROMPT, 6]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def row_of(start: int, stop: int, *, parent: int = -1, num_above: int = 0, level: int = 0) -> Row:
    return Row(start, stop, parent, num_above, level)


def test_siblings_in_a_row_are_masked_from_each_other() -> None:
    tree = build_tree(TWO_ANSWERS, min_saved=1)
    assert cut_rows(tree) == [row_of(0, 6)]
    (only,) = passes(tree)
    assert only.mask is not None
    assert only.ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert only.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
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
    assert cut_rows(tree, 4, 0) == [row_of(0, 3), row_of(3, 6, parent=0, num_above=3, level=1)]
    _, below = passes(tree, 4, repeated_tokens=0)
    assert below.above is not None
    assert below.mask is not None
    assert below.above.tolist() == [[0, 1, 2]]
    assert below.positions.tolist() == [[3, 4, 3]]
    assert below.mask.int().tolist() == [[[[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]]]


def test_separate_sequences_need_no_mask() -> None:
    (only,) = passes(build_tree([[1] * 90, [2] * 95]))
    assert only.ids.shape == (2, 95)
    assert only.mask is None


def test_small_trees_share_a_row() -> None:
    assert cut_rows(build_tree([[1] * 20, [2] * 20, [3] * 20, [4] * 20])) == [row_of(0, 60), row_of(60, 80)]


def test_rows_of_very_different_length_do_not_pad_each_other() -> None:
    tree = build_tree([[1] * 60, [2] * 400, [3] * 62])
    assert [part.ids.shape for part in passes(tree)] == [(2, 62), (1, 400)]


def test_passes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rows, "PASS_TOKENS", 20)
    tree = build_tree([[token] * 9 for token in range(6)])
    assert [part.ids.shape for part in passes(tree, 9)] == [(2, 9)] * 3


def test_rows_share_their_prefix_if_that_saves_enough() -> None:
    tree = build_tree([[*PROMPT, 4, 4], [*PROMPT, 5], [*PROMPT, 6], [7, 8, 8], [7, 9]], min_saved=1)
    *_, below = passes(tree, 1, shared_saved=3, repeated_tokens=0)
    assert [(prefix.num_rows, prefix.tokens.tolist()) for prefix in below.shared] == [(3, [0, 1, 2]), (2, [7])]
    assert below.above is None
    assert below.ids.tolist() == [[5, 5], [6, 6], [4, 4], [9, 9], [8, 8]], "in the order of their parents; padded"
    assert below.mask is None, "below a shared prefix, each token sees those before it"
    *_, below = passes(tree, 1, shared_saved=4, repeated_tokens=0)
    assert not below.shared, "2 * 3 + 1 tokens are saved, less than 4 for each of two prefixes"


def test_short_prefix_of_few_rows_is_repeated() -> None:
    tree = build_tree(TWO_ANSWERS, min_saved=1)
    assert cut_rows(tree, 2, 2) == cut_rows(tree, 2, 0), "a copy of three tokens would be too much"
    first, second = cut_rows(tree, 2, 3)
    assert (first.start, first.stop, first.repeated, first.owns_repeated) == (3, 5, range(3), True)
    assert (second.start, second.stop, second.repeated, second.owns_repeated) == (5, 6, range(3), False)
    (only,) = passes(tree, 2, repeated_tokens=3)
    assert only.ids.tolist() == [[1, 2, 3, 6, 6], [1, 2, 3, 4, 5]], "the shorter first; padded"
    assert only.positions[:, :4].tolist() == [[0, 1, 2, 3]] * 2
    assert (only.above, only.mask) == (None, None)
    assert only.tokens.tolist() == [5, 0, 1, 2, 3, 4], "each once"
    assert only.real.tolist() == [3, 5, 6, 7, 8, 9]


def test_all_further_copies_of_a_repeated_prefix_count() -> None:
    tree = build_tree([[*PROMPT, answer, 7] for answer in range(4)], min_saved=1)
    assert [row.repeated for row in cut_rows(tree, 2, 9)] == [range(3)] * 4
    assert [row.repeated for row in cut_rows(tree, 2, 8)] == [range(0)] * 5


def test_long_node_is_not_repeated_even_for_a_single_row() -> None:
    tree = build_tree([[*[1] * 50, 2], [*[1] * 50, 3]])
    assert [row.repeated for row in cut_rows(tree, 51, 50)] == [range(50)]
    assert [row.repeated for row in cut_rows(tree, 51, 49)] == [range(0), range(0)]


def seen_by_token(
    tree: TokenTree, row_tokens: int, shared_saved: int | None, repeated_tokens: int
) -> dict[int, set[int]]:
    """Return the tokens that each token of the tree attends to, read from the passes."""
    seen = {}
    above = {place: line for line in map(tree.positions, range(len(tree.paths))) for place in line}
    for part in passes(tree, row_tokens, shared_saved, repeated_tokens):
        num_rows, length = part.ids.shape
        tokens = torch.full((num_rows * length,), -1).index_copy(0, part.real, part.tokens).view(num_rows, length)
        copies = tokens.clone()
        for row, own in enumerate(tokens):
            first = int((own >= 0).nonzero()[0])
            copies[row, :first] = torch.tensor(above[int(own[first])])[part.positions[row, :first]]
        assert part.ids[copies >= 0].tolist() == [tree.ids[token] for token in copies[copies >= 0]]
        gathered = torch.zeros(num_rows, 0, dtype=torch.long) if part.above is None else part.above
        keys = torch.cat([gathered, copies], dim=1)
        causal = torch.ones(num_rows, 1, length, length, dtype=torch.bool).tril()
        mask = causal if part.mask is None else part.mask
        shared_of_row = [prefix.tokens.tolist() for prefix in part.shared for _ in range(prefix.num_rows)] or [
            []
        ] * num_rows
        for row, step in (copies >= 0).nonzero().tolist():
            visible = shared_of_row[row] + keys[row][mask[row, 0, step]].tolist()
            assert len(visible) == len(set(visible)) == part.positions[row, step] + 1
            assert seen.setdefault(int(copies[row, step]), set(visible)) == set(visible), "also for copies"
        assert len(set(part.tokens.tolist())) == len(part.tokens), "each is taken once"
    return seen


@given(
    SEQUENCES,
    st.integers(1, 20),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([None, 1]),
    st.sampled_from([0, 2, 5, 64]),
)
def test_each_token_attends_only_to_its_own_prefix(
    sequences: list[list[int]], min_saved: int, row_tokens: int, shared_saved: int | None, repeated_tokens: int
) -> None:
    tree = build_tree(sequences, min_saved=min_saved)
    expected = {
        token: set(positions[: place + 1])
        for positions in map(tree.positions, range(len(sequences)))
        for place, token in enumerate(positions)
    }
    assert seen_by_token(tree, row_tokens, shared_saved, repeated_tokens) == expected
    taken = sorted(
        token for part in passes(tree, row_tokens, shared_saved, repeated_tokens) for token in part.tokens.tolist()
    )
    assert taken == list(range(len(tree.ids)))
