"""A token tree cut into rows, the runs of its tokens that a model computes side by side.

A row holds whole subtrees below one node, its *parent*, and sees the tokens down to that node as its past. Within the
row, a token sees those before it whose subtree has not ended: itself and its ancestors, but not its siblings. That is
the mask of tree attention (Miao et al. 2024, SpecInfer; Yao et al. 2024, DeFT), which here carries gradients too.

A tree that fits into a row is run in one pass. A longer one is cut where it forks, so that neither masked pairs of
tokens nor copies of prefixes cost much beside the model's matrix products. Where those copies would be long, rows
with the same parent read them as a *shared prefix*. Where they are very short, as of a system message, each row
*repeats* them, and computes these tokens again for itself: that costs less than a pass.

Shapes: b rows of one pass, L tokens of its longest row, A tokens above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rllm.algorithms.tree import ROW_TOKENS, TokenTree

PASS_TOKENS = 8192
"""Padded tokens in one pass."""
PASS_PADDING = 64
"""Padding tokens that always cost less than another pass; above it, an eighth of the tokens may be padding."""
SHARED_SAVED = 1024
"""Tokens' keys that reading a shared prefix in place must save from being copied, to be worth an attention of its
own."""
REPEATED_TOKENS = 64
"""Tokens that may be computed again to save a pass. A pass costs about as much, whatever the size of the model, since
it reads and writes the gradients of all weights."""


@dataclass(frozen=True, slots=True)
class Row:
    """`tree.ids[start:stop]`, after the tokens that it repeats."""

    start: int
    stop: int
    parent: int
    """Index of the node above; -1 where there is none."""
    num_above: int
    """Number of tokens above those that are repeated."""
    level: int = 0
    """Number of rows above."""
    repeated: range = range(0)
    """Positions in the tree of the tokens that this row and its siblings each begin with."""
    owns_repeated: bool = False
    """The states of the repeated tokens are taken from this row; those of its siblings are copies."""

    @property
    def length(self) -> int:
        return len(self.repeated) + self.stop - self.start


def cut_rows(tree: TokenTree, row_tokens: int = ROW_TOKENS, repeated_tokens: int = REPEATED_TOKENS) -> list[Row]:
    """Return the tree's tokens as rows, in order: each node with its whole subtree where that fits, else alone.

    A node that would be a row by itself is repeated by those below it instead, if it and its further copies have at
    most `repeated_tokens` tokens.
    """
    rows, row_of = _cut(tree, row_tokens)
    below: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        below.setdefault(row.parent, []).append(number)
    dropped: set[int] = set()
    for node, number in row_of.items():
        top, (first, *others) = rows[number], below[node]
        is_alone = top.length == tree.nodes[node].length
        if is_alone and top.length * max(len(others), 1) <= repeated_tokens:
            dropped.add(number)
            repeated = range(top.start, top.stop)
            for member in (first, *others):
                row = rows[member]
                rows[member] = Row(
                    row.start, row.stop, top.parent, top.num_above, repeated=repeated, owns_repeated=member == first
                )
    leveled: list[Row] = []
    level_of, node_of = {-1: -1}, {number: node for node, number in row_of.items()}
    for number, row in enumerate(rows):
        if number not in dropped:
            leveled.append(replace(row, level=level_of[row.parent] + 1))
            if number in node_of:
                level_of[node_of[number]] = leveled[-1].level
    return leveled


def _cut(tree: TokenTree, row_tokens: int) -> tuple[list[Row], dict[int, int]]:
    """Return rows that repeat nothing, and for each node with rows below it the number of its row."""
    rows: list[Row] = []
    row_of: dict[int, int] = {}
    stops = tree.stops()
    end = 0  # end of the subtree that was last put into a row
    for index, node in enumerate(tree.nodes):
        if node.start < end:
            continue
        whole = stops[index] - node.start <= row_tokens
        end = stops[index] if whole else node.start + node.length
        last = rows[-1] if rows else None
        if last and last.parent == node.parent and last.stop == node.start and end - last.start <= row_tokens:
            rows[-1] = Row(last.start, end, last.parent, last.num_above)
        else:
            rows.append(Row(node.start, end, node.parent, node.offset))
        if end < stops[index]:
            row_of[index] = len(rows) - 1
    return rows, row_of


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tokens above rows that follow each other in a pass."""

    num_rows: int
    tokens: Tensor  # [A] positions in the tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Rows that are run at once, as a model takes them."""

    ids: Tensor  # [b, L]
    positions: Tensor  # [b, L] number of tokens above each, wherever its row holds it
    mask: Tensor | None  # [b, 1, L, A + L] True where the first attends to the second; None: causal
    above: Tensor | None  # [b, A] positions in the tree of the tokens above each row; None: none, or shared
    shared: tuple[SharedPrefix, ...]  # of all rows, or none
    real: Tensor  # [n] indices in the b * L tokens of those to keep: no padding, no copies of repeated tokens
    tokens: Tensor  # [n] positions of these in the tree


def passes(
    tree: TokenTree,
    row_tokens: int = ROW_TOKENS,
    shared_saved: int | None = None,
    repeated_tokens: int = REPEATED_TOKENS,
) -> Iterator[Pass]:
    """Yield all rows of a tree, each after those above it.

    Args:
        tree: not empty.
        row_tokens: see `ROW_TOKENS`.
        shared_saved: see `SHARED_SAVED`; `None` shares no prefixes.
        repeated_tokens: see `REPEATED_TOKENS`; 0 repeats none.
    """
    ids = torch.tensor(tree.ids)
    depths, stops = depths_and_stops(tree)
    for rows in _batches(cut_rows(tree, row_tokens, repeated_tokens)):
        shared = () if shared_saved is None else _shared_prefixes(tree, rows, shared_saved)
        start, end = (torch.tensor([[getattr(row, name)] for row in rows]) for name in ("start", "stop"))
        repeated = torch.tensor([[[len(row.repeated)], [row.repeated.start]] for row in rows])
        count, first = repeated.unbind(1)  # [b, 1] each
        place = torch.arange(max(row.length for row in rows))  # [L]
        tokens = torch.where(place < count, first + place, start + place - count)  # [b, L]
        is_real = tokens < end
        tokens = tokens.where(is_real, start)
        owned = torch.tensor([[row.owns_repeated] for row in rows]) | (place >= count)
        kept = (is_real & owned).flatten().nonzero().flatten()
        above, seen = (None, torch.ones(len(rows), 1, 0, dtype=torch.bool)) if shared else _above(tree, rows)
        needed = above is not None or bool((stops[tokens] < end).any())
        yield Pass(
            ids=ids[tokens],
            positions=depths[tokens],
            mask=_mask(tokens, stops[tokens], seen) if needed else None,
            above=above,
            shared=shared,
            real=kept,
            tokens=tokens.flatten()[kept],
        )


def depths_and_stops(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Return [T] each token's position in its sequences, and [T] the end of the subtree of its node."""
    lengths = torch.tensor([node.length for node in tree.nodes])
    starts, offsets = (torch.tensor([getattr(node, name) for node in tree.nodes]) for name in ("start", "offset"))
    depths = torch.arange(len(tree.ids)) + (offsets - starts).repeat_interleave(lengths)
    return depths, torch.tensor(tree.stops()).repeat_interleave(lengths)


def _mask(tokens: Tensor, stops: Tensor, seen: Tensor) -> Tensor:
    """Return [b, 1, L, A + L] from tokens [b, L], ends of subtrees [b, L], and tokens seen above [b, 1, A].

    Padding follows the real tokens of its row, and sees at least the first of them.
    """
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    inside = causal & (tokens[:, :, None] < stops[:, None, :])
    return torch.cat([seen.expand(-1, length, -1), inside], dim=2).unsqueeze(1)


def _shared_prefixes(tree: TokenTree, rows: list[Row], shared_saved: int) -> tuple[SharedPrefix, ...]:
    """Return the prefix above the rows of each parent, or none if sharing is not worth it."""
    members = Counter(row.parent for row in rows)
    above = {row.parent: row.num_above for row in rows}
    saved = sum((number - 1) * above[parent] for parent, number in members.items())
    if saved < shared_saved * len(members):
        return ()
    return tuple(SharedPrefix(number, torch.tensor(tree.down_to(parent))) for parent, number in members.items())


def _above(tree: TokenTree, rows: list[Row]) -> tuple[Tensor | None, Tensor]:
    """Return the positions in the tree of the tokens above each row [b, A], and which are not padding [b, 1, A]."""
    depth = max(row.num_above for row in rows)
    seen = torch.arange(depth) < torch.tensor([[row.num_above] for row in rows])
    if depth == 0:
        return None, seen.unsqueeze(1)
    above = torch.zeros(len(rows), depth, dtype=torch.long)
    for number, row in enumerate(rows):
        above[number, : row.num_above] = torch.tensor(tree.down_to(row.parent))
    return above, seen.unsqueeze(1)


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    """Yield the rows level by level, at most `PASS_TOKENS` padded tokens at a time.

    Rows of similar length go together, so that padding costs less than another pass would. Within a batch they are in
    the order of their parents.
    """
    for level in range(1 + max(row.level for row in rows)):
        batch: list[Row] = []
        num_real = 0
        for row in sorted((row for row in rows if row.level == level), key=lambda row: row.length):
            padded, num_real = row.length * (len(batch) + 1), num_real + row.length
            if batch and (padded > PASS_TOKENS or padded - num_real > max(PASS_PADDING, padded // 8)):
                yield sorted(batch, key=lambda row: row.parent)
                batch, num_real = [], row.length
            batch.append(row)
        yield sorted(batch, key=lambda row: row.parent)
