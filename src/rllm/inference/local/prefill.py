"""Which tokens of new prompts are computed together: runs of them, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rllm.inference.local.prefix_cache import BLOCK, Block
from rllm.inference.local.stems import ROWS

PASS_TOKENS = 2048
"""Tokens of one forward pass, padding included."""
_WASTE = 1.25
"""Runs that are computed together differ in length by at most this factor, and a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """A prompt that is being taken in."""

    tokens: tuple[int, ...]
    """Those whose states are to be held."""
    path: list[Block]
    """The blocks that are known."""
    made: list[Block]
    """The blocks to be stored once they are computed."""

    @property
    def num_cached(self) -> int:
        return len(self.path) * BLOCK

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_cached


@dataclass(frozen=True, slots=True)
class Run:
    """`tokens[start:]` of the prompt in a slot, which follow others that are known."""

    place: int
    tokens: tuple[int, ...]
    start: int

    @property
    def length(self) -> int:
        return len(self.tokens) - self.start


def in_batches(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of rising length in neighbouring slots, cut where padding them to one length would waste too much."""
    batches: list[list[Run]] = []
    for run in runs:
        batch = batches[-1] if batches else None
        if run.length == 0:
            continue
        if (
            batch is None
            or run.length > _WASTE * batch[0].length + BLOCK
            or run.length * (len(batch) + 1) > PASS_TOKENS
        ):
            batches.append([run])
        else:
            batch.append(run)
    return batches


def last_column(batch: list[Run]) -> int:
    """Behind the last column that is written when a batch is padded to one length."""
    return max(run.start for run in batch) + even(max(run.length for run in batch))


def even(number: int, step: int = ROWS) -> int:
    """The next multiple of `step`."""
    return max(-(-number // step), 1) * step
