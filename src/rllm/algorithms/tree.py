"""Token sequences merged into prefix trees, so that a token which several sequences share is computed once.

The eight samples of one prompt share that prompt; the prompts of one batch share the system message and the tools. A
*node* is a run of tokens that belong to the same sequences. Nodes are stored depth first: a node, all that lies below it,
then its sibling. Their tokens lie behind each other in the same order, so `tree.ids` is one flat list, a sequence is a list
of positions in it, and a whole subtree is one run of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SAVED = 16
"""A shared run becomes a node of its own when that saves at least this many tokens; below it costs more than it saves."""
ROW_TOKENS = 64
"""Subtrees of up to this many tokens are computed as one row, in which a node costs nothing: there every run is shared.
Shorter rows copy the keys above them more often, longer ones compute more pairs that are masked out: with twice as many an
update of answers of 64 or 128 tokens takes some 4 % longer, and one of short answers as long."""


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens: `tree.ids[start : start + length]`, preceded by the tokens of its parents."""

    start: int
    length: int
    parent: int
    """Index of the parent node; -1 for a root."""
    offset: int
    """Number of tokens above this one: the position of its first token in every sequence that holds it."""


@dataclass(slots=True)
class TokenTree:
    """Prefix trees over the sequences of a batch."""

    ids: list[int] = field(default_factory=list)
    """Every distinct token once, node by node."""
    nodes: list[Node] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    """For each sequence, in the order given, the node indices from root to leaf."""

    def positions(self, sequence: int) -> list[int]:
        """Where each token of a sequence lies in `ids`; as long as the sequence."""
        runs = (self.nodes[index] for index in self.paths[sequence])
        return [position for node in runs for position in range(node.start, node.start + node.length)]

    def stops(self) -> list[int]:
        """For each node, where in `ids` the last token at or below it is followed by the next one."""
        stops = [node.start + node.length for node in self.nodes]
        for index in range(len(self.nodes) - 1, -1, -1):
            parent = self.nodes[index].parent
            if parent >= 0:
                stops[parent] = max(stops[parent], stops[index])
        return stops

    def down_to(self, index: int) -> list[int]:
        """Where the tokens of a node and of those above it lie in `ids`, from the root on; none for -1."""
        runs: list[range] = []
        while index >= 0:
            node = self.nodes[index]
            runs.append(range(node.start, node.start + node.length))
            index = node.parent
        return [position for run in reversed(runs) for position in run]


def build_tree(
    sequences: Sequence[Sequence[int]], *, min_saved: int = MIN_SAVED, row_tokens: int = ROW_TOKENS
) -> TokenTree:
    """Merge the common prefixes of token sequences. None of them may be empty."""
    tree = TokenTree(paths=[[] for _ in sequences])
    lists, everyone = [list(ids) for ids in sequences], list(range(len(sequences)))
    _grow(tree, lists, everyone, parent=-1, offset=0, fork=0, min_saved=min_saved, row_tokens=row_tokens)
    return tree


def _grow(
    tree: TokenTree,
    sequences: list[list[int]],
    members: list[int],
    *,
    parent: int,
    offset: int,
    fork: int,
    min_saved: int,
    row_tokens: int,
) -> None:
    """Add what lies below `parent`, whose tokens end at `offset`; up to `fork`, which is no earlier, all members agree.

    A shared run that saves too little is left to the subtrees, which share it together with more tokens or not at all.
    """
    for branch in _branches(sequences, members, fork):
        end = _end_of_shared(sequences, branch, fork)
        longer = [member for member in branch if len(sequences[member]) > end]
        fits = sum(len(sequences[member]) - offset for member in branch) <= row_tokens
        num_ways_on = len({sequences[member][end] for member in longer}) + len(branch) - len(longer)
        if fits or len(branch) == 1 or (num_ways_on - 1) * (end - offset) >= min_saved:
            below = _add_node(tree, sequences[branch[0]][offset:end], parent, offset, branch)
            _grow(
                tree, sequences, longer, parent=below, offset=end, fork=end, min_saved=min_saved, row_tokens=row_tokens
            )
        else:
            for member in branch:
                if len(sequences[member]) == end:
                    _add_node(tree, sequences[member][offset:], parent, offset, [member])
            _grow(
                tree,
                sequences,
                longer,
                parent=parent,
                offset=offset,
                fork=end,
                min_saved=min_saved,
                row_tokens=row_tokens,
            )


def _branches(sequences: list[list[int]], members: list[int], fork: int) -> list[list[int]]:
    """The members by their token at `fork`, in the order in which they first appear."""
    by_token: dict[int, list[int]] = {}
    for member in members:
        by_token.setdefault(sequences[member][fork], []).append(member)
    return list(by_token.values())


def _end_of_shared(sequences: list[list[int]], members: list[int], start: int) -> int:
    """Where the common run of tokens from `start` on ends: as far as the smallest and the greatest of them agree."""
    rests = [sequences[member][start:] for member in members]
    first, last = min(rests), max(rests)
    pairs = enumerate(zip(first, last, strict=False), start)
    return next((place for place, (one, other) in pairs if one != other), start + min(len(first), len(last)))


def _add_node(tree: TokenTree, ids: list[int], parent: int, offset: int, members: list[int]) -> int:
    index = len(tree.nodes)
    tree.nodes.append(Node(start=len(tree.ids), length=len(ids), parent=parent, offset=offset))
    tree.ids.extend(ids)
    for member in members:
        tree.paths[member].append(index)
    return index
