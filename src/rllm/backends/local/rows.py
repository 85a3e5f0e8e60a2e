"""A token tree cut into rows, the runs of its tokens that a model computes side by side.

A row holds whole subtrees below one node, the row's *anchor*, and sees the tokens down to it as its past. Within the row,
a token sees those before it whose subtree has not ended: itself, its ancestors, and nothing of its siblings. That is the
mask of tree attention (Miao et al. 2024, SpecInfer; Yao et al. 2024, DeFT), which here carries gradients too.

A tree that fits into a row is run in one pass. A longer one is cut where it forks, so that neither the pairs of tokens that
are masked out nor the copies of what lies above cost much beside the model's matrix products. Where those copies would be
long, rows with the same anchor share what lies above them as their *stem*. Where they are very short, as of a system message,
each row begins with a *lead* instead, the tokens above it, which it computes for itself: that costs less than a pass.

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
"""Padding that is always worth a pass less; above it, an eighth of the tokens may be padding."""
STEM_SAVED = 1024
"""A stem is worth an attention of its own if that saves copying at least so many tokens' keys."""
LEAD_TOKENS = 64
"""A pass costs as much as so many tokens, whatever the size of the model: it reads and writes the gradients of all weights.
What is computed again to save one may be that much."""


@dataclass(frozen=True, slots=True)
class Row:
    """`tree.ids[start:stop]`, behind its lead."""

    start: int
    stop: int
    anchor: int
    """Index of the node above; -1 where there is none."""
    num_above: int
    """Number of tokens above the lead."""
    level: int = 0
    """Number of rows above."""
    lead: range = range(0)
    """Where the tokens lie in the tree that this row and its siblings each begin with."""
    owns_lead: bool = False
    """Whether the states of the lead are taken from this row; its siblings compute copies of them."""

    @property
    def length(self) -> int:
        return len(self.lead) + self.stop - self.start


def cut_rows(tree: TokenTree, row_tokens: int = ROW_TOKENS, lead_tokens: int = LEAD_TOKENS) -> list[Row]:
    """The tree's tokens as rows, in order: every node with its whole subtree where that fits, else alone.

    A node that would be a row by itself becomes the lead of those below it, if it and its further copies have at most
    `lead_tokens` tokens.
    """
    rows, row_of = _cut(tree, row_tokens)
    below: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        below.setdefault(row.anchor, []).append(number)
    leads: set[int] = set()
    for node, number in row_of.items():
        top, (first, *others) = rows[number], below[node]
        is_alone = top.length == tree.nodes[node].length
        if is_alone and top.length * max(len(others), 1) <= lead_tokens:
            leads.add(number)
            lead = range(top.start, top.stop)
            for member in (first, *others):
                row = rows[member]
                rows[member] = Row(row.start, row.stop, top.anchor, top.num_above, lead=lead, owns_lead=member == first)
    leveled: list[Row] = []
    level_of, node_of = {-1: -1}, {number: node for node, number in row_of.items()}
    for number, row in enumerate(rows):
        if number not in leads:
            leveled.append(replace(row, level=level_of[row.anchor] + 1))
            if number in node_of:
                level_of[node_of[number]] = leveled[-1].level
    return leveled


def _cut(tree: TokenTree, row_tokens: int) -> tuple[list[Row], dict[int, int]]:
    """The rows without leads; and by node, for those that others lie below, the number of its row."""
    rows: list[Row] = []
    row_of: dict[int, int] = {}
    stops = tree.stops()
    end = 0  # where the subtree ends that was last put into a row
    for index, node in enumerate(tree.nodes):
        if node.start < end:
            continue
        whole = stops[index] - node.start <= row_tokens
        end = stops[index] if whole else node.start + node.length
        last = rows[-1] if rows else None
        if last and last.anchor == node.parent and last.stop == node.start and end - last.start <= row_tokens:
            rows[-1] = Row(last.start, end, last.anchor, last.num_above)
        else:
            rows.append(Row(node.start, end, node.parent, node.offset))
        if end < stops[index]:
            row_of[index] = len(rows) - 1
    return rows, row_of


@dataclass(frozen=True, slots=True)
class Stem:
    """What lies above rows that follow each other in a pass."""

    num_rows: int
    tokens: Tensor  # [A] where its tokens lie in the tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Rows that are run at once, as a model takes them."""

    ids: Tensor  # [b, L]
    positions: Tensor  # [b, L] how many tokens lie above each, wherever its row holds it
    mask: Tensor | None  # [b, 1, L, A + L] who may attend to whom; None: each token to those before it
    above: Tensor | None  # [b, A] where the tokens above each row lie in the tree; None: there are none, or stems
    stems: tuple[Stem, ...]  # of all rows, or none
    real: Tensor  # [n] which of the b * L tokens are taken: no padding, and no copies of a lead
    tokens: Tensor  # [n] where these lie in the tree


def passes(
    tree: TokenTree, row_tokens: int = ROW_TOKENS, stem_saved: int | None = None, lead_tokens: int = LEAD_TOKENS
) -> Iterator[Pass]:
    """All rows of a tree, each behind those above it.

    Args:
        tree: not empty.
        row_tokens: see `ROW_TOKENS`.
        stem_saved: see `STEM_SAVED`; `None`: there are no stems.
        lead_tokens: see `LEAD_TOKENS`; 0: there are no leads.
    """
    ids = torch.tensor(tree.ids)
    depths, stops = depths_and_stops(tree)
    for rows in _batches(cut_rows(tree, row_tokens, lead_tokens)):
        stems = () if stem_saved is None else _stems(tree, rows, stem_saved)
        start, end = (torch.tensor([[getattr(row, name)] for row in rows]) for name in ("start", "stop"))
        lead, lead_start = torch.tensor([[[len(row.lead)], [row.lead.start]] for row in rows]).unbind(1)  # [b, 1] each
        place = torch.arange(max(row.length for row in rows))  # [L]
        tokens = torch.where(place < lead, lead_start + place, start + place - lead)  # [b, L]
        is_real = tokens < end
        tokens = tokens.where(is_real, start)
        owned = torch.tensor([[row.owns_lead] for row in rows]) | (place >= lead)
        kept = (is_real & owned).flatten().nonzero().flatten()
        above, seen = (None, torch.ones(len(rows), 1, 0, dtype=torch.bool)) if stems else _above(tree, rows)
        needed = above is not None or bool((stops[tokens] < end).any())
        yield Pass(
            ids=ids[tokens],
            positions=depths[tokens],
            mask=_mask(tokens, stops[tokens], seen) if needed else None,
            above=above,
            stems=stems,
            real=kept,
            tokens=tokens.flatten()[kept],
        )


def depths_and_stops(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """[T] each: a token's position in its sequences, and where the subtree of its node ends."""
    lengths = torch.tensor([node.length for node in tree.nodes])
    starts, offsets = (torch.tensor([getattr(node, name) for node in tree.nodes]) for name in ("start", "offset"))
    depths = torch.arange(len(tree.ids)) + (offsets - starts).repeat_interleave(lengths)
    return depths, torch.tensor(tree.stops()).repeat_interleave(lengths)


def _mask(tokens: Tensor, stops: Tensor, seen: Tensor) -> Tensor:
    """[b, 1, L, A + L] from the rows' tokens [b, L], where their subtrees end [b, L], and what they see above [b, 1, A].

    Padding stands behind the real tokens of its row, and sees the first of them at least.
    """
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    inside = causal & (tokens[:, :, None] < stops[:, None, :])
    return torch.cat([seen.expand(-1, length, -1), inside], dim=2).unsqueeze(1)


def _stems(tree: TokenTree, rows: list[Row], stem_saved: int) -> tuple[Stem, ...]:
    """What lies above the rows of a pass, for each anchor, if that is worth it."""
    members = Counter(row.anchor for row in rows)
    above = {row.anchor: row.num_above for row in rows}
    saved = sum((number - 1) * above[anchor] for anchor, number in members.items())
    if saved < stem_saved * len(members):
        return ()
    return tuple(Stem(number, torch.tensor(tree.down_to(anchor))) for anchor, number in members.items())


def _above(tree: TokenTree, rows: list[Row]) -> tuple[Tensor | None, Tensor]:
    """Where the tokens above each row lie in the tree [b, A], and which of them are no padding [b, 1, A]."""
    depth = max(row.num_above for row in rows)
    seen = torch.arange(depth) < torch.tensor([[row.num_above] for row in rows])
    if depth == 0:
        return None, seen.unsqueeze(1)
    above = torch.zeros(len(rows), depth, dtype=torch.long)
    for number, row in enumerate(rows):
        above[number, : row.num_above] = torch.tensor(tree.down_to(row.anchor))
    return above, seen.unsqueeze(1)


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    """The rows level by level, at most `PASS_TOKENS` padded tokens at a time; those of similar length together, so that
    padding costs less than another pass would. Within a batch they are in the order of their anchors."""
    for level in range(1 + max(row.level for row in rows)):
        batch: list[Row] = []
        num_real = 0
        for row in sorted((row for row in rows if row.level == level), key=lambda row: row.length):
            padded, num_real = row.length * (len(batch) + 1), num_real + row.length
            if batch and (padded > PASS_TOKENS or padded - num_real > max(PASS_PADDING, padded // 8)):
                yield sorted(batch, key=lambda row: row.anchor)
                batch, num_real = [], row.length
            batch.append(row)
        yield sorted(batch, key=lambda row: row.anchor)
