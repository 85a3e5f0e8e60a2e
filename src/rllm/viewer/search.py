"""Filters of rollouts, as a query string says them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice

from rllm.errors import ConfigError
from rllm.types import Trace
from rllm.viewer.messages import said
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
"""Rollouts whose texts are read for one page; the page offers to go on."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is looked for; empty fields say nothing. All that is said must hold."""

    text: str = ""
    """In a message or an answer, in any case."""
    role: str = ""
    reward: str = ""
    """`1`, `>0.5`, `<=0`, `0..0.5`, or `none` for unscored."""
    tool: str = ""
    """Part of the name of a tool that was called."""
    error: str = ""
    """Part of the error's type or message; `any` for whatever failed."""
    badge: str = ""
    split: str = ""
    step: str = ""
    task: str = ""
    sort: str = "newest"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """
        Raises:
            ConfigError: if a field cannot be understood.
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
        """The fields that say something."""
        return {
            item.name: value for item in fields(self) if (value := getattr(self, item.name)) and value != item.default
        }

    def matches(self, rollout: Rollout) -> bool:
        """Whether all but the text fits."""
        error = rollout.error or {}
        said = f"{error.get('type', '')} {error.get('message', '')}".lower()
        return (
            (not self.role or self.role in rollout.roles)
            and self.wants_reward(rollout.reward)
            and (not self.tool or any(self.tool.lower() in tool.lower() for tool in rollout.tools))
            and (not self.error or (bool(error) and (self.error == "any" or self.error.lower() in said)))
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
    """One page of what was found."""

    rollouts: list[Rollout]
    total: int | None
    """`None`: the texts of all would have to be read to know."""
    next_offset: int | None
    """Where to go on."""
    num_read: int = 0
    """Rollouts whose texts were read."""


def search(
    rollouts: Iterable[Rollout],
    query: Query,
    traces_of: Callable[[str], list[Trace]],
    *,
    offset: int = 0,
    limit: int = 50,
) -> Found:
    """The rollouts that fit, sorted; `offset` is that of the page before, counted before the text is looked at."""
    fitting = sorted((item for item in rollouts if query.matches(item)), key=SORTS[query.sort])
    rest = fitting[offset:]
    if not query.text:
        more = offset + limit if len(rest) > limit else None
        return Found(rollouts=rest[:limit], total=len(fitting), next_offset=more)
    found: list[Rollout] = []
    num_read = 0
    for rollout in islice(rest, _MAX_READ):
        num_read += 1
        if says(query.text, traces_of(rollout.session_id)):
            found.append(rollout)
            if len(found) == limit:
                break
    more = offset + num_read if num_read < len(rest) else None
    return Found(rollouts=found, total=None, next_offset=more, num_read=num_read)


def says(text: str, traces: Iterable[Trace]) -> bool:
    """Whether a message or an answer has this text, in any case."""
    wanted = text.lower()
    return any(wanted in said.lower() for trace in traces for said in _texts(trace))


def _texts(trace: Trace) -> Iterator[str]:
    for message in (*trace.messages, trace.response):
        told = said(message)
        yield told.text
        yield told.reasoning
        for name, arguments in told.tools:
            yield f"{name} {arguments}"
