"""A token tree cut into rows, the runs of its tokens whose attention is computed side by side.

A row holds whole subtrees below one node, its *parent*, and sees the tokens down to that node. Within the row, a token
sees those before it whose subtree has not ended: itself and its ancestors, but not its siblings. That is the mask of
tree attention (Miao et al. 2024, SpecInfer; Yao et al. 2024, DeFT), which here carries gradients too.

A tree that fits into a row is one. A longer one is cut where it forks, so that neither masked pairs of tokens nor
copies of keys cost much compared with the model's matrix products. Where those copies would be long, rows with the same
parent read them as a *shared prefix*.

Shapes: b rows of one block, L tokens of its longest row, A tokens above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rllm.algorithms.tree import ROW_TOKENS, TokenTree

BLOCK_TOKENS = 8192
"""Padded tokens in one block."""
PADDING = 64
"""Padding tokens that always cost less than another block; above it, an eighth of the tokens may be padding."""
SHARED_SAVED = 1024
"""Number of tokens whose keys a shared prefix must save from being copied, to be worth an attention of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """`tree.ids[start:stop]`."""

    start: int
    stop: int
    parent: int
    """Index of the node above; -1 where there is none."""
    num_above: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def cut_rows(tree: TokenTree, row_tokens: int = ROW_TOKENS) -> list[Row]:
    """Return the tree's tokens as rows, in order: each node with its whole subtree where that fits, else alone."""
    rows: list[Row] = []
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
    return rows


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tokens above rows that follow each other in a block."""

    num_rows: int
    tokens: Tensor  # [A] positions in the tree


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Rows whose attention is computed at once."""

    tokens: Tensor  # [b, L] positions in the tree; padding repeats the first of its row
    is_real: Tensor  # [b, L] False for padding
    mask: Tensor | None  # [b, 1, L, A + L] True where the first attends to the second; None: causal
    above: Tensor | None  # [b, A] positions in the tree of the tokens above each row; None: none, or shared
    shared: tuple[SharedPrefix, ...]  # of all rows, or none


def blocks(tree: TokenTree, row_tokens: int = ROW_TOKENS, shared_saved: int | None = None) -> Iterator[AttentionBlock]:
    """Yield all rows of a tree.

    Args:
        tree: not empty.
        row_tokens: see `ROW_TOKENS`.
        shared_saved: see `SHARED_SAVED`; `None` shares no prefixes.
    """
    stops = token_stops(tree)
    for rows in _batches(cut_rows(tree, row_tokens)):
        shared = () if shared_saved is None else _shared_prefixes(tree, rows, shared_saved)
        start, end = (torch.tensor([[getattr(row, name)] for row in rows]) for name in ("start", "stop"))
        tokens = start + torch.arange(max(row.length for row in rows))  # [b, L]
        is_real = tokens < end
        tokens = tokens.where(is_real, start)
        above, seen = (None, torch.ones(len(rows), 1, 0, dtype=torch.bool)) if shared else _above(tree, rows)
        needed = above is not None or bool((stops[tokens] < end).any())
        mask = _mask(tokens, stops[tokens], seen) if needed else None
        yield AttentionBlock(tokens=tokens, is_real=is_real, mask=mask, above=above, shared=shared)


def token_depths(tree: TokenTree) -> Tensor:
    """Return [T] each token's position in its sequences."""
    return torch.arange(len(tree.ids)) + _of_tokens(tree, [node.offset - node.start for node in tree.nodes])


def token_stops(tree: TokenTree) -> Tensor:
    """Return [T] the end of the subtree of each token's node."""
    return _of_tokens(tree, tree.stops())


def _of_tokens(tree: TokenTree, numbers: list[int]) -> Tensor:
    """Return [T] the number of each token's node."""
    return torch.tensor(numbers).repeat_interleave(torch.tensor([node.length for node in tree.nodes]))


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
    """Yield rows of similar length together, at most `BLOCK_TOKENS` padded tokens at a time.

    Roots are kept apart from the other rows, which have tokens above them. Within a batch, rows are in the order of
    their parents.
    """
    for are_roots in (True, False):
        batch: list[Row] = []
        num_real = 0
        for row in sorted((row for row in rows if (row.parent < 0) == are_roots), key=lambda row: row.length):
            padded, num_real = row.length * (len(batch) + 1), num_real + row.length
            if batch and (padded > BLOCK_TOKENS or padded - num_real > max(PADDING, padded // 8)):
                yield sorted(batch, key=lambda row: row.parent)
                batch, num_real = [], row.length
            batch.append(row)
        if batch:
            yield sorted(batch, key=lambda row: row.parent)
