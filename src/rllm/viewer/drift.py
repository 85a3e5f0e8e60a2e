"""Where a prompt is not what was sampled before it: the two lists of ids, aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TypeAlias

from rllm.types import DRIFT_KEY, Trace

CAUSES = {
    "edited": "the agent changed what was said",
    "reasoning": "the template, or the agent, left out the reasoning",
    "tool_json": "the arguments of a tool call were written otherwise",
    "template": "the template prints the past, or its white space, otherwise",
}
Block: TypeAlias = tuple[str, int, int, int, int]
"""As `difflib` says it: how two stretches compare, and where they begin and end in either list."""

_AROUND = 12
"""Tokens that are shown on either side of a difference."""
_ISLAND = 4
"""Equal tokens between two differences, below which they belong to these."""
_ALL_ALIGNED = 1000
"""Tokens up to which the most frequent ones, such as spaces, count as places to align at: that takes the square of the time."""
_LONGEST = 20_000
"""Tokens up to which differences are looked for; what lies behind counts as one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of both lists that is equal, or differs as a whole."""

    same: bool
    sampled: list[int]
    rendered: list[int]
    at: int
    """Position of its first token in what was sampled."""
    num_left_out: int = 0
    """Equal tokens that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A call whose prompt departs from the call that it follows."""

    trace: Trace
    prior: Trace
    cause: str
    num_common: int
    """Tokens before the first difference."""
    pieces: list[Piece]

    @property
    def explanation(self) -> str:
        return CAUSES.get(self.cause, "the reason is not known to this version")


def drifts_of(traces: Sequence[Trace]) -> list[Drift]:
    """Those of a session, in call order."""
    found = []
    for place, trace in enumerate(traces):
        cause = trace.metadata.get(DRIFT_KEY)
        earlier = [item for item in traces[:place] if item.response_ids and item.error is None]
        if cause and earlier:
            prior = max(earlier, key=lambda item: _likeness(item, trace))
            found.append(_drift(trace, prior, str(cause)))
    return found


def num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _likeness(prior: Trace, trace: Trace) -> tuple[int, int]:
    """The call that it follows has most of its messages, and then most of its tokens."""
    messages = [*prior.messages, prior.response]
    pairs = zip(messages, trace.messages, strict=False)
    alike = next((number for number, (one, other) in enumerate(pairs) if one != other), len(messages))
    return alike, num_alike(prior.prompt_ids, trace.prompt_ids)


def _drift(trace: Trace, prior: Trace, cause: str) -> Drift:
    sampled, rendered = [*prior.prompt_ids, *prior.response_ids], trace.prompt_ids
    common = num_alike(sampled, rendered)
    return Drift(trace=trace, prior=prior, cause=cause, num_common=common, pieces=_aligned(sampled, rendered, common))


def _aligned(sampled: Sequence[int], rendered: Sequence[int], common: int) -> list[Piece]:
    one, other = list(sampled[common : common + _LONGEST]), list(rendered[common : common + _LONGEST])
    pieces = [_same(sampled[:common], 0)]
    blocks = _merged(SequenceMatcher(None, one, other, autojunk=len(other) > _ALL_ALIGNED).get_opcodes())
    last = len(blocks) - 1
    for number, (kind, begin, end, start, stop) in enumerate(blocks):
        if kind == "equal":
            pieces.append(_same(one[begin:end], common + begin))
        elif number == last and begin == end:
            # The prompt goes on behind the answer: that is new, and no difference.
            pieces.append(
                Piece(
                    same=True,
                    sampled=[],
                    rendered=other[start : start + _AROUND],
                    at=common + begin,
                    num_left_out=max(stop - start - _AROUND, 0),
                )
            )
        else:
            pieces.append(Piece(same=False, sampled=one[begin:end], rendered=other[start:stop], at=common + begin))
    return [piece for piece in pieces if piece.sampled or piece.rendered]


def _merged(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks, with few equal tokens between two differences counted as different: they would tear words apart."""
    merged: list[Block] = []
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
