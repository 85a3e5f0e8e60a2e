"""Why rollouts say nothing about the policy, counted so that one fault is one line however often it struck."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rllm.types import Episode

_VARYING = re.compile(
    r"""
    (?<=\breturned\ )(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")     # what a model wrote, which an agent returned
    | 0x[0-9a-fA-F]+                                      # addresses
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b   # UUIDs
    | \b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b               # hexadecimal ids
    | \d+(?:\.\d+)*(?:[eE][+-]?\d+)?                      # numbers, addresses of hosts
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One fault, and how many rollouts it struck."""

    text: str
    """The first message, whole: an example where the messages differ."""
    count: int
    num_variants: int = 1
    """How many different messages were counted as this fault, since they differ only in ids, numbers or returned text."""

    def __str__(self) -> str:
        others = (
            f" (and {self.num_variants - 1} like it, but for ids, numbers or returned text)"
            if self.num_variants > 1
            else ""
        )
        return f"{self.count} x {self.text}{others}"


def why_failed(episode: Episode) -> str | None:
    """`"ErrorType: message"` of a failed rollout, without the name of its session; `None` if it did not fail."""
    if not episode.failed:
        return None
    error = episode.info["error"]
    text = f"{error['type']}: {error['message']}"
    return text.replace(episode.session_id, "...") if episode.session_id else text


def why_unscored(episode: Episode) -> str | None:
    """Why nobody judged a rollout that did not fail; `None` if it was judged, or failed."""
    if episode.failed or episode.is_correct or any(path.final_reward() is not None for path in episode.trajectories):
        return None
    return str(episode.info.get("unscored") or "it has no reward")


def count_reasons(messages: Iterable[str]) -> list[Reason]:
    """The messages as faults, most frequent first; those that differ only in ids, numbers or returned text are one fault."""
    by_kind: dict[str, Counter[str]] = {}
    for message in messages:
        by_kind.setdefault(_VARYING.sub("#", message), Counter())[message] += 1
    reasons = [
        Reason(text=next(iter(variants)), count=variants.total(), num_variants=len(variants))
        for variants in by_kind.values()
    ]
    return sorted(reasons, key=lambda reason: -reason.count)
