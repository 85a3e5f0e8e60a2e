"""Token sequences merged into prefix trees, so that a token shared by several sequences is computed once.

The samples of one prompt share that prompt; the prompts of one batch share the system message and the tools. A *node*
is a run of tokens that belong to the same sequences. Nodes are stored depth first: a node, everything below it, then
its sibling. Their tokens are stored in the same order, so `tree.ids` is one flat list, a sequence is a list of
positions in it, and a subtree is one run of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

MIN_SAVED = 16
"""Tokens that a node must save: with fewer, it costs more than it saves."""
ROW_TOKENS = 64
"""Maximum tokens of a subtree that is computed as one row, in which nodes are free: there every run is shared.

Shorter rows copy the keys above them more often, longer ones compute more masked pairs: with twice as many, an update
of answers of 64 or 128 tokens takes some 4 % longer.
"""
_PIECE = 128
"""Tokens of each sequence compared at a time, so that long sequences that differ early are not copied."""


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
        """Return the position in `ids` of each token of a sequence."""
        runs = (self.nodes[index] for index in self.paths[sequence])
        return [position for node in runs for position in range(node.start, node.start + node.length)]

    def stops(self) -> list[int]:
        """Return, for each node, the end in `ids` of the tokens at or below it."""
        stops = [node.start + node.length for node in self.nodes]
        for index in range(len(self.nodes) - 1, -1, -1):
            parent = self.nodes[index].parent
            if parent >= 0:
                stops[parent] = max(stops[parent], stops[index])
        return stops

    def down_to(self, index: int) -> list[int]:
        """Return the positions in `ids` of the tokens of a node and those above it, from the root; none for -1."""
        runs: list[range] = []
        while index >= 0:
            node = self.nodes[index]
            runs.append(range(node.start, node.start + node.length))
            index = node.parent
        return [position for run in reversed(runs) for position in run]


def build_tree(
    sequences: Sequence[Sequence[int]], *, min_saved: int = MIN_SAVED, row_tokens: int = ROW_TOKENS
) -> TokenTree:
    """Merge the common prefixes of token sequences, none of which may be empty."""
    tree = TokenTree(paths=[[] for _ in sequences])
    lists = [list(ids) for ids in sequences]
    # A stack of our own, the next branch on top: sequences may fork more often than calls may nest.
    pending = _branches(lists, list(range(len(lists))), parent=-1, offset=0, fork=0)
    while pending:
        pending += _grow(tree, lists, pending.pop(), min_saved, row_tokens)
    return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class _Branch:
    """Sequences that agree up to and including `fork`; tokens before `offset` are in the nodes down to `parent`."""

    members: list[int]
    parent: int
    offset: int
    fork: int


def _grow(
    tree: TokenTree, sequences: list[list[int]], branch: _Branch, min_saved: int, row_tokens: int
) -> list[_Branch]:
    """Add the tokens that the members of a branch share, and return the branches after them, in reverse order.

    A shared run that saves too little is left to those branches, which share it with more tokens or not at all.
    """
    members, parent, offset = branch.members, branch.parent, branch.offset
    end = end_of_shared([sequences[member] for member in members], branch.fork)
    longer = [member for member in members if len(sequences[member]) > end]
    fits = sum(len(sequences[member]) - offset for member in members) <= row_tokens
    num_ways_on = len({sequences[member][end] for member in longer}) + len(members) - len(longer)
    if fits or (num_ways_on - 1) * (end - offset) >= min_saved:
        below = _add_node(tree, sequences[members[0]][offset:end], parent, offset, members)
        return _branches(sequences, longer, parent=below, offset=end, fork=end)
    for member in members:
        if len(sequences[member]) == end:
            _add_node(tree, sequences[member][offset:], parent, offset, [member])
    return _branches(sequences, longer, parent=parent, offset=offset, fork=end)


def _branches(sequences: list[list[int]], members: list[int], *, parent: int, offset: int, fork: int) -> list[_Branch]:
    """Return the members by their token at `fork`; members with the first token come last."""
    by_token: dict[int, list[int]] = {}
    for member in members:
        by_token.setdefault(sequences[member][fork], []).append(member)
    return [_Branch(members=theirs, parent=parent, offset=offset, fork=fork) for theirs in reversed(by_token.values())]


def end_of_shared(sequences: Sequence[list[int]], start: int = 0) -> int:
    """Return the end of the common run of tokens from `start`, by comparing the smallest and the greatest sequence."""
    if len(sequences) == 1:
        return len(sequences[0])
    for place in count(start, _PIECE):
        pieces = [ids[place : place + _PIECE] for ids in sequences]
        first, last = min(pieces), max(pieces)
        if first != last or len(first) < _PIECE:
            break
    pairs = enumerate(zip(first, last, strict=False), place)
    return next((end for end, (one, other) in pairs if one != other), place + min(len(first), len(last)))


def _add_node(tree: TokenTree, ids: list[int], parent: int, offset: int, members: list[int]) -> int:
    index = len(tree.nodes)
    tree.nodes.append(Node(start=len(tree.ids), length=len(ids), parent=parent, offset=offset))
    tree.ids.extend(ids)
    for member in members:
        tree.paths[member].append(index)
    return index
