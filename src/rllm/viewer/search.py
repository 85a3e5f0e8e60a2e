"""Filters of rollouts, from a query string."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice

from rllm.errors import ConfigError
from rllm.types import Trace
from rllm.viewer.messages import message_parts
from rllm.viewer.rollouts import Rollout

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "": operator.eq,
}
_NUMBER = r"-?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?"
_REWARD = re.compile(rf"\s*+(<=|>=|<|>|=|)\s*+({_NUMBER})\s*+(?:(?:\.\.|to)\s*+({_NUMBER})\s*+)?")
SORTS: dict[str, Callable[[Rollout], float]] = {
    "newest": lambda item: -item.created_at,
    "reward": lambda item: -(item.reward if item.reward is not None else float("-inf")),
    "lowest reward": lambda item: item.reward if item.reward is not None else float("inf"),
    "longest": lambda item: -item.num_tokens,
    "slowest": lambda item: -(item.seconds or 0.0),
    "most calls": lambda item: -item.num_calls,
}
_MAX_READ = 400
"""Rollouts whose texts are read for one page; the page offers to continue."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Filters, all of which must match; empty fields match everything."""

    text: str = ""
    """Text in a message or an answer, ignoring case."""
    role: str = ""
    reward: str = ""
    """`1`, `>0.5`, `<=0`, `0..0.5`, or `none` for unscored."""
    tool: str = ""
    """Part of the name of a called tool."""
    error: str = ""
    """Part of the error's type or message; `any` for any failure."""
    badge: str = ""
    split: str = ""
    step: str = ""
    task: str = ""
    sort: str = "newest"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """Parse a query string.

        Raises:
            ConfigError: if a field is invalid.
        """
        query = cls(**{item.name: given[item.name].strip() for item in fields(cls) if given.get(item.name, "").strip()})
        query.wants_reward(0.0)
        if query.step and not (query.step.isdecimal() and len(query.step) <= 12):
            raise ConfigError(f"step={query.step!r}: use a number")
        if query.sort not in SORTS:
            raise ConfigError(f"sort={query.sort!r}: use one of {', '.join(SORTS)}")
        return query

    @property
    def is_empty(self) -> bool:
        return all(not getattr(self, item.name) for item in fields(self) if item.name != "sort")

    def to_dict(self) -> dict[str, str]:
        """Return the fields that are set."""
        return {
            item.name: value for item in fields(self) if (value := getattr(self, item.name)) and value != item.default
        }

    def matches(self, rollout: Rollout) -> bool:
        """Return whether all filters but the text match."""
        error = rollout.error or {}
        text = f"{error.get('type', '')} {error.get('message', '')}".lower()
        return (
            (not self.role or self.role in rollout.roles)
            and self.wants_reward(rollout.reward)
            and (not self.tool or any(self.tool.lower() in tool.lower() for tool in rollout.tools))
            and (not self.error or (bool(error) and (self.error == "any" or self.error.lower() in text)))
            and (not self.badge or any(word == self.badge for word, _ in rollout.badges))
            and (not self.split or rollout.split == self.split)
            and (not self.step or rollout.step == int(self.step))
            and (not self.task or self.task.lower() in rollout.task_id.lower())
        )

    def wants_reward(self, reward: float | None) -> bool:
        if not self.reward:
            return True
        if self.reward == "none":
            return reward is None
        found = _REWARD.fullmatch(self.reward)
        if found is None:
            raise ConfigError(f"reward={self.reward!r}: use a number, >0.5, <=0, 0..0.5, or none")
        sign, low, high = found.groups()
        if reward is None:
            return False
        if high is not None:
            return float(low) <= reward <= float(high)
        return _COMPARISONS[sign](reward, float(low))


@dataclass(frozen=True, kw_only=True)
class Found:
    """One page of results."""

    rollouts: list[Rollout]
    total: int | None
    """Number of matches; `None` for a text, since all texts would have to be read."""
    next_offset: int | None
    """Offset of the next page."""
    num_read: int = 0
    """Number of rollouts whose texts were read."""


def search(
    rollouts: Iterable[Rollout],
    query: Query,
    traces_of: Callable[[str], list[Trace]],
    *,
    offset: int = 0,
    limit: int = 50,
) -> Found:
    """Return matching rollouts, sorted; `offset` counts rollouts that match without the text."""
    fitting = sorted((item for item in rollouts if query.matches(item)), key=SORTS[query.sort])
    rest = fitting[offset:]
    if not query.text:
        more = offset + limit if len(rest) > limit else None
        return Found(rollouts=rest[:limit], total=len(fitting), next_offset=more)
    found: list[Rollout] = []
    num_read = 0
    for rollout in islice(rest, _MAX_READ):
        num_read += 1
        if contains_text(query.text, traces_of(rollout.session_id)):
            found.append(rollout)
            if len(found) == limit:
                break
    more = offset + num_read if num_read < len(rest) else None
    return Found(rollouts=found, total=None, next_offset=more, num_read=num_read)


def contains_text(text: str, traces: Iterable[Trace]) -> bool:
    """Return whether a message or an answer has this text, ignoring case."""
    wanted = text.lower()
    return any(wanted in part.lower() for trace in traces for part in _texts(trace))


def _texts(trace: Trace) -> Iterator[str]:
    for message in (*trace.messages, trace.response):
        parts = message_parts(message)
        yield parts.text
        yield parts.reasoning
        for name, arguments in parts.tools:
            yield f"{name} {arguments}"
