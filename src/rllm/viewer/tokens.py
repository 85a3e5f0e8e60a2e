"""Tokens of a call and of all calls before it, with all known values of each; and prompts that differ from them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import TypeAlias

from rllm.capture import SessionTree
from rllm.parser.append_only import common_length
from rllm.types import DRIFT_KEY, StepCredit, Trace, credits_by_trace, token_versions
from rllm.viewer.batches import FedBatch


def credit_of_calls(credits_: Iterable[StepCredit]) -> dict[str, StepCredit]:
    """Merge the credits of each call over its trajectories: advantages add up, as gradients do."""
    return {trace_id: _together(members) for trace_id, members in credits_by_trace(credits_).items()}


def _together(members: Sequence[StepCredit]) -> StepCredit:
    latest = [credit for credit in members if credit.training_step == members[-1].training_step]
    learned = [credit for credit in latest if credit.dropped is None]
    if len(learned) < 2:
        return [*learned, *latest][0]
    advantages = [credit.advantage for credit in learned if credit.advantage is not None]
    return replace(
        learned[0],
        trajectory_name=" + ".join(dict.fromkeys(credit.trajectory_name for credit in learned)),
        reward=None,
        group_id=None,
        baseline=None,
        advantage=sum(advantages) if advantages else None,
    )


CAUSES = {
    "edited": "the agent changed earlier messages",
    "reasoning": "the template, or the agent, left out the reasoning",
    "tool_json": "arguments of a tool call were written differently",
    "template": "the template prints earlier messages or white space differently",
}
_AROUND = 12
"""Tokens shown on either side of a difference."""
_ISLAND = 4
"""Shorter equal blocks between two differences count as different."""
_ALL_ALIGNED = 1000
"""Length up to which frequent tokens, such as spaces, are used to align, which takes quadratic time."""
_LONGEST = 20_000
"""Tokens that are aligned; the rest counts as one difference."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of both lists that is equal, or differs as a whole."""

    same: bool
    sampled: list[int]
    rendered: list[int]
    at: int
    """Position of its first token in the sampled list."""
    num_left_out: int = 0
    """Number of equal tokens that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A call whose prompt differs from the tokens of the call that it follows."""

    trace: Trace
    prior: Trace
    cause: str
    num_common: int
    """Number of tokens before the first difference."""
    pieces: list[Piece]

    @property
    def explanation(self) -> str:
        return CAUSES.get(self.cause, "unknown reason")


def drifts_of(traces: Sequence[Trace]) -> list[Drift]:
    """Return the drifts of a session, in call order."""
    found = []
    for place, trace in enumerate(traces):
        cause = trace.metadata.get(DRIFT_KEY)
        earlier = [item for item in traces[:place] if item.response_ids and item.error is None]
        if cause and earlier:
            prior = max(earlier, key=lambda item: _likeness(item, trace))
            sampled = [*prior.prompt_ids, *prior.response_ids]
            common = common_length(sampled, trace.prompt_ids)
            pieces = _aligned(sampled, trace.prompt_ids, common)
            found.append(Drift(trace=trace, prior=prior, cause=str(cause), num_common=common, pieces=pieces))
    return found


def _likeness(prior: Trace, trace: Trace) -> tuple[int, int]:
    """Return a sort key: the call that it follows shares most messages, then most tokens."""
    alike = common_length([*prior.messages, prior.response], trace.messages)
    return alike, common_length(prior.prompt_ids, trace.prompt_ids)


def _aligned(sampled: Sequence[int], rendered: Sequence[int], common: int) -> list[Piece]:
    one, other = list(sampled[common : common + _LONGEST]), list(rendered[common : common + _LONGEST])
    pieces = [_same(sampled[:common], 0)]
    blocks = _merged(SequenceMatcher(None, one, other, autojunk=len(other) > _ALL_ALIGNED).get_opcodes())
    for kind, begin, end, start, stop in blocks:
        at = common + begin
        if kind == "equal":
            pieces.append(_same(one[begin:end], at))
        elif begin == end == len(one):
            # The prompt continues after the answer: new tokens, not a difference.
            new, rest = other[start : start + _AROUND], max(stop - start - _AROUND, 0)
            pieces.append(Piece(same=True, sampled=[], rendered=new, at=at, num_left_out=rest))
        else:
            pieces.append(Piece(same=False, sampled=one[begin:end], rendered=other[start:stop], at=at))
    return [piece for piece in pieces if piece.sampled or piece.rendered]


def _merged(blocks: Sequence[tuple[str, int, int, int, int]]) -> list[tuple[str, int, int, int, int]]:
    """Merge differences with few equal tokens between them, which would split words."""
    merged: list[tuple[str, int, int, int, int]] = []
    for number, (kind, begin, end, start, stop) in enumerate(blocks):
        is_island = kind == "equal" and 0 < number < len(blocks) - 1 and end - begin < _ISLAND
        differs = kind != "equal" or is_island
        if differs and merged and merged[-1][0] != "equal":
            _, first, _, beginning, _ = merged[-1]
            merged[-1] = ("replace", first, end, beginning, stop)
        else:
            merged.append(("replace" if differs else "equal", begin, end, start, stop))
    return merged


def _same(ids: Sequence[int], at: int) -> Piece:
    shown = list(ids[-_AROUND:])
    return Piece(
        same=True, sampled=shown, rendered=shown, at=at + len(ids) - len(shown), num_left_out=len(ids) - len(shown)
    )


Column: TypeAlias = list[float | None]

OVERLAYS = {
    "mask": "which tokens the policy sampled, and which of them were trained on",
    "sampler": "log-probability under the sampler, in nats",
    "trainer": "log-probability under the trainer before the update, in nats",
    "gap": "trainer minus sampler, in nats: 0 where they agree",
    "ratio": "probability after the updates on this batch, divided by that before; clipped tokens are outlined",
    "entropy": "entropy of the distribution that the token was sampled from, in nats",
    "advantage": "advantage of the token",
    "version": "which weights sampled the token",
}
"""Overlays of the text."""


@dataclass(kw_only=True)
class TokenTable:
    """One sequence; every column has an entry for each token, `None` if it is unknown."""

    ids: list[int]
    spans: list[tuple[int, int, str]]
    """Sampled spans, in order and disjoint: start, stop, and the id of the call."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Columns by the names of `OVERLAYS`, and `weight`.

    `mask` is 0 for prompt tokens, 1 for sampled, 2 for trained ones.
    """
    clip: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def clipped(self, place: int) -> bool:
        """Return whether the ratio of this token was clipped."""
        ratio, advantage = self.columns["ratio"][place], self.columns["advantage"][place]
        if self.clip is None or ratio is None or advantage is None:
            return False
        low, high = self.clip
        return (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)


def token_table(
    trace: Trace, traces: Sequence[Trace], credits_: Sequence[StepCredit], batch: FedBatch | None
) -> TokenTable:
    """Collect everything known of the tokens of a call and of the calls before it."""
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
            # Trajectories that share a call each give its tokens an advantage.
            put(name, [sum(values) for values in zip(*fed, strict=True)] if name == "advantage" else fed[0])


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Scale from values to classes of the style sheet: `d-5` to `d5` around a middle, or `s0` to `s8`."""

    bounds: tuple[float, ...]
    """Bounds between classes."""
    diverges: bool = False

    def class_of(self, value: float | None) -> str:
        if value is None:
            return ""
        if not self.diverges:
            return f"s{bisect_right(self.bounds, value)}"
        size = bisect_left(self.bounds, abs(value))
        return f"d{size if value > 0 else -size}" if size else "d0"


SCALES = {
    "sampler": Scale(bounds=(0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 4.0, 7.0)),
    "entropy": Scale(bounds=(0.01, 0.05, 0.15, 0.3, 0.6, 1.0, 1.7, 2.5)),
    "gap": Scale(bounds=(1e-5, 1e-3, 0.01, 0.05, 0.2), diverges=True),
    "ratio": Scale(bounds=(0.005, 0.05, 0.1, 0.2, 0.4), diverges=True),
    "advantage": Scale(bounds=(1e-6, 0.25, 0.75, 1.25, 2.0), diverges=True),
}
"""Scales by overlay. Log-probabilities are negated."""


def shade(overlay: str, value: float | None, *, clipped: bool = False) -> str:
    """Return the class of a token under an overlay."""
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
