"""The tokens of a call and of all that led to it, with everything that is known of each.

Columns are aligned to the sequence: prompt and answer of the call, with the answers of earlier calls inside the prompt where
the prompt begins with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rllm.capture import SessionTree
from rllm.types import StepCredit, Trace, token_versions
from rllm.viewer.batches import FedBatch
from rllm.viewer.credited import credit_of_calls

Column: TypeAlias = list[float | None]

OVERLAYS = {
    "mask": "which tokens the policy sampled, and which of them were trained on",
    "sampler": "log-probability under the sampler, in nats",
    "trainer": "log-probability under the trainer before the update, in nats",
    "gap": "trainer less sampler, in nats: 0 where they agree",
    "ratio": "probability after the updates on this batch over that before; what is clipped is outlined",
    "entropy": "entropy of what the token was drawn from, in nats",
    "advantage": "what having chosen the token was worth",
    "version": "which weights sampled the token",
}
"""What can be laid over the text."""


@dataclass(kw_only=True)
class TokenTable:
    """One sequence; every column has an entry for each token, `None` where there is nothing to say."""

    ids: list[int]
    spans: list[tuple[int, int, str]]
    """What was sampled: from, to, and by which call; in order and apart."""
    columns: dict[str, Column] = field(default_factory=dict)
    """By the names of `OVERLAYS`, and `weight`. `mask` is 0 for a prompt's token, 1 for a sampled one, 2 if it was trained on."""
    clip: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def clipped(self, place: int) -> bool:
        """Whether the update stopped pushing this token because its ratio had left the range."""
        ratio, advantage = self.columns["ratio"][place], self.columns["advantage"][place]
        if self.clip is None or ratio is None or advantage is None:
            return False
        low, high = self.clip
        return (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)


def token_table(
    trace: Trace, traces: Sequence[Trace], credits_: Sequence[StepCredit], batch: FedBatch | None
) -> TokenTable:
    """Everything that is known of the tokens of a call and of the calls before it.

    Args:
        trace: the last call.
        traces: of its session.
        credits_: what the trainer decided about them.
        batch: what the optimiser was fed at that step, if it was kept.
    """
    ids = [*trace.prompt_ids, *trace.response_ids]
    table = TokenTable(ids=ids, spans=[], clip=batch.clip if batch else None)
    table.columns = {name: [None] * len(ids) for name in (*OVERLAYS, "weight")}
    table.columns["mask"] = [0.0] * len(ids)
    credit_of = credit_of_calls(credits_)
    for item in SessionTree(traces).path_to(trace):
        start = len(item.prompt_ids)
        table.spans.append((start, start + len(item.response_ids), item.id))
        _fill(table, start, item, credit_of.get(item.id), batch)
    return table


def _fill(table: TokenTable, start: int, trace: Trace, credit: StepCredit | None, batch: FedBatch | None) -> None:
    count = len(trace.response_ids)
    columns = table.columns

    def put(name: str, values: Sequence[float | None]) -> None:
        if len(values) == count:
            columns[name][start : start + count] = [
                None if value is None or not math.isfinite(value) else value for value in values
            ]

    put("mask", [1.0] * count)
    put("sampler", trace.logprobs)
    put("version", [float(version) for version in token_versions(trace)])
    if credit is not None:
        put("advantage", [credit.advantage] * count)
        if credit.trainer_logprobs is not None and len(credit.trainer_logprobs) == count:
            put("mask", [2.0] * count)
            put("trainer", list(credit.trainer_logprobs))
            if len(trace.logprobs) == count:
                put("gap", [one - other for one, other in zip(credit.trainer_logprobs, trace.logprobs, strict=True)])
    spans = batch.by_trace.get(trace.id, []) if batch is not None else []
    for name in ("advantage", "weight", "entropy", "ratio"):
        if batch is not None and spans and name in batch.numbers:
            fed = [list(batch.numbers[name][span.tokens]) for span in spans]
            # Trajectories that share a call give each of its tokens an advantage.
            put(name, [sum(values) for values in zip(*fed, strict=True)] if name == "advantage" else fed[0])


NUM_SHADES = 5
"""Classes on either side of the middle; the style sheet has a colour for each."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values to classes of the style sheet: `d-5` to `d5` around a middle, or `s0` to `s8` from little to much."""

    bounds: tuple[float, ...]
    """Where a class ends and the next begins."""
    diverges: bool = False

    def class_of(self, value: float | None) -> str:
        if value is None:
            return ""
        if not self.diverges:
            return f"s{bisect_right(self.bounds, value)}"
        size = bisect_left(self.bounds, abs(value))
        return f"d{size if value > 0 else -size}" if size else "d0"


_ODDS = (0.05, 0.1, 0.2, 0.4)
SCALES = {
    "sampler": Scale(bounds=(0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 4.0, 7.0)),
    "entropy": Scale(bounds=(0.01, 0.05, 0.15, 0.3, 0.6, 1.0, 1.7, 2.5)),
    "gap": Scale(bounds=(1e-5, 1e-3, 0.01, 0.05, 0.2), diverges=True),
    "ratio": Scale(bounds=(0.005, *_ODDS), diverges=True),
    "advantage": Scale(bounds=(1e-6, 0.25, 0.75, 1.25, 2.0), diverges=True),
}
"""Of log-probabilities the negated value is shown: the surprise."""


def shade(overlay: str, value: float | None, *, clipped: bool = False) -> str:
    """The class of a token under an overlay."""
    if value is None:
        return ""
    if overlay == "mask":
        return ("", "m1", "m2")[int(value)]
    if overlay == "version":
        return f"v{int(value) % 6}"
    if overlay in ("sampler", "trainer"):
        return SCALES["sampler"].class_of(-value)
    if overlay == "ratio":
        return SCALES["ratio"].class_of(value - 1.0) + (" clip" if clipped else "")
    return SCALES[overlay].class_of(value)
