from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.tree import TokenTree, build_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=8)
"""Three tokens only, so that many prefixes are shared."""


def spelt(tree: TokenTree) -> list[list[int]]:
    """Return each sequence, read from the tree."""
    return [[tree.ids[position] for position in tree.positions(index)] for index in range(len(tree.paths))]


def num_prefixes(sequences: list[list[int]]) -> int:
    """Return the number of nodes of a trie of single tokens."""
    return len({tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)})


@given(SEQUENCES, st.integers(1, 20))
def test_paths_of_the_tree_spell_the_sequences(sequences: list[list[int]], min_saved: int) -> None:
    assert spelt(build_tree(sequences, min_saved=min_saved)) == sequences


@given(SEQUENCES)
def test_fully_merged_tree_holds_shared_tokens_once(sequences: list[list[int]]) -> None:
    assert len(build_tree(sequences, min_saved=1).ids) == num_prefixes(sequences)


@given(SEQUENCES, st.integers(1, 20))
def test_nodes_have_their_parent_and_offset(sequences: list[list[int]], min_saved: int) -> None:
    tree = build_tree(sequences, min_saved=min_saved)
    for path in tree.paths:
        above: list[int] = []
        for number, index in enumerate(path):
            node = tree.nodes[index]
            assert node.parent == (path[number - 1] if number else -1)
            assert node.parent < index, "parents first"
            assert node.offset == len(above)
            above += range(node.start, node.start + node.length)
            assert tree.down_to(index) == above


@given(SEQUENCES, st.integers(1, 20))
def test_subtree_is_a_contiguous_run_of_tokens(sequences: list[list[int]], min_saved: int) -> None:
    tree = build_tree(sequences, min_saved=min_saved)
    for index, stop in enumerate(tree.stops()):
        below = {other for path in tree.paths if index in path for other in path[path.index(index) :]}
        tokens = [
            place
            for other in sorted(below)
            for place in range(tree.nodes[other].start, tree.nodes[other].start + tree.nodes[other].length)
        ]
        assert tokens == list(range(tree.nodes[index].start, stop))


@given(SEQUENCES, st.integers(1, 20))
def test_nodes_are_shared_only_if_that_saves_enough(sequences: list[list[int]], min_saved: int) -> None:
    tree = build_tree(sequences, min_saved=min_saved, row_tokens=0)
    for index, node in enumerate(tree.nodes):
        users = sum(index in path for path in tree.paths)
        assert users == 1 or (users - 1) * node.length >= min_saved


def test_tree_of_two_prompts_matches_a_hand_built_one() -> None:
    one, other = [1, 2, 3, 4], [1, 2, 7, 8]
    tree = build_tree([[*one, 5], [*one, 6], other, [*other, 9]], min_saved=1)
    assert tree.paths == [[0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5]]
    assert tree.ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_shared_first_token_does_not_hide_longer_prefixes() -> None:
    one, other = [1] + [2] * 30, [1] + [3] * 30
    tree = build_tree([[*one, 4], [*one, 5], [*other, 4], [*other, 5]], row_tokens=0)
    assert len(tree.ids) == 2 * 31 + 4, "each prompt once, the shared first token twice: one token is not worth a node"


def test_saved_tokens_count_branches_not_samples() -> None:
    groups = [[[1, *[prompt] * 30, sample] for sample in range(20)] for prompt in (2, 3)]
    tree = build_tree([path for group in groups for path in group], row_tokens=0)
    assert len(tree.ids) == 2 * (31 + 20), "forty samples share the first token, and the two prompts need it twice"


def test_sequences_that_fit_a_row_share_every_token() -> None:
    answers = [[7, 1, 1], [7, 1, 2], [7, 2, 2]]
    tree = build_tree([[5] * 100 + answer for answer in answers])
    assert tree.ids == [*[5] * 100, 7, 1, 1, 2, 2, 2], "the three answers fit a row"


def test_equal_sequences_share_everything() -> None:
    tree = build_tree([[1] * 20, [1] * 20])
    assert tree.paths == [[0], [0]]
    assert len(tree.ids) == 20


def test_sequence_may_be_a_prefix_of_another() -> None:
    tree = build_tree([[1] * 20, [1] * 20 + [2]])
    assert tree.paths == [[0], [0, 1]]


@pytest.mark.parametrize("length", [127, 128, 129, 256, 300])
def test_long_prefix_is_shared_to_its_last_token(length: int) -> None:
    prefix = list(range(length))
    tree = build_tree([[*prefix, 7], [*prefix, 8], prefix], min_saved=1, row_tokens=0)
    assert [node.length for node in tree.nodes] == [length, 1, 1]
    assert tree.paths == [[0, 1], [0, 2], [0]]


@pytest.mark.slow
def test_number_of_forks_may_exceed_the_recursion_limit() -> None:
    steps = [[1] * place + [2] for place in range(1, sys.getrecursionlimit() + 1)]
    tree = build_tree(steps, min_saved=1, row_tokens=0)
    assert len(tree.ids) == 2 * len(steps), "each step adds a token to the history, and its own answer"
    assert [tree.ids[place] for place in tree.positions(len(steps) - 1)] == steps[-1]


def test_tree_of_an_empty_list_is_empty() -> None:
    assert build_tree([]).ids == []
