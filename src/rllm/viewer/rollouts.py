"""Rollouts of a run, from the metadata of their sessions, and their filters; traces are only read to find a text."""

from __future__ import annotations

import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec import field as struct_field

from rllm.engine.episode_log import plain_task_id
from rllm.errors import ConfigError
from rllm.store.base import SessionInfo, TraceStore, may_be_of
from rllm.types import OUTCOME_KEY, JSONObject, Trace, why_left_out
from rllm.viewer.texts import message_parts


class StepOutcome(Struct, kw_only=True, gc=False):
    """Outcome of one step."""

    id: str
    """Id of its call's trace."""
    reward: float | None = None
    advantage: float | None = None
    drift: str | None = None
    """Cause, if its prompt does not continue the sampled tokens."""


class PathOutcome(Struct, kw_only=True, gc=False):
    """Outcome of one trajectory."""

    name: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    verdict: JSONObject = {}
    """Metadata of the reward, such as a judge's reasons."""
    advantage: float | None = None
    dropped: str | None = None
    trainable: bool = True
    truncated: bool = False
    num_tokens: int = 0
    tools: list[str] = []
    steps: list[StepOutcome] = []


_PAGE = 1000
_FRESH_S = 1.0
"""Seconds for which read data counts as fresh."""
_MAY_STILL_END_S = 6 * 3600.0
"""Age after which an unfinished rollout is not checked again."""


class StoredRollout(Struct, kw_only=True, dict=True):
    """One session of the store, with the outcome in its metadata."""

    session_id: str
    created_at: float
    num_calls: int
    task_id: str = ""
    """Task id with the training step after an @, as in the trainer."""
    index: int = 0
    split: str = ""
    step: int | None = None
    """Step as in metrics: the training step, or the number of steps before an evaluation."""
    has_ended: bool = False
    unreadable: str | None = None
    """Reason that its outcome cannot be read."""
    ended: str | None = None
    is_correct: Any = False
    """Any truthy value counts as correct."""
    error: dict[str, str] | None = None
    warnings: list[str] = []
    metrics: JSONObject = {}
    paths: list[PathOutcome] = struct_field(default=[], name="trajectories")

    @property
    def title(self) -> str:
        return f"{self.task_name} · {self.index}" if self.task_id else self.session_id

    @property
    def task_name(self) -> str:
        """Task id without the training step."""
        return plain_task_id(self.task_id) if self.split == "train" else self.task_id

    @cached_property
    def reward(self) -> float | None:
        """Mean over its agents; `None` if it is unscored."""
        rewards = [path.reward for path in self.paths if path.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def seconds(self) -> float | None:
        seconds = self.metrics.get("timing/rollout_s")
        return seconds if isinstance(seconds, int | float) else None

    @property
    def num_tokens(self) -> int:
        return sum(path.num_tokens for path in self.paths)

    @property
    def roles(self) -> list[str]:
        return [path.name for path in self.paths]

    @cached_property
    def tools(self) -> list[str]:
        return sorted({tool for path in self.paths for tool in path.tools})

    @cached_property
    def drifts(self) -> list[str]:
        """Causes of prompts that do not continue sampled tokens, one for each such call."""
        return [step.drift for path in self.paths for step in path.steps if step.drift is not None]

    @cached_property
    def badges(self) -> list[tuple[str, str]]:
        """Badges: a word and a sentence each."""
        found = []
        if not self.has_ended:
            found.append(("running", "no outcome was recorded: it is running, or its run was stopped"))
        if self.error:
            found.append(("failed", f"{self.error.get('type', '')}: {self.error.get('message', '')}"[:300]))
        if self.unreadable:
            found.append(("unreadable", f"its outcome cannot be read: {self.unreadable}"))
        if any(path.truncated for path in self.paths):
            found.append(("truncated", "an answer was truncated at its maximum length"))
        reasons = {path.dropped for path in self.paths if path.dropped}
        for reason in sorted(reasons):
            found.append((reason.replace("_", " "), f"left out of training: {why_left_out(reason)}"))
        if self.has_ended and not self.error and not self.unreadable and self.reward is None:
            found.append(("unscored", "it has no reward"))
        if self.drifts:
            found.append(("drift", f"prompts differ from the sampled tokens: {', '.join(sorted(set(self.drifts)))}"))
        return list({word: (word, text) for word, text in found}.values())


class Rollouts:
    """All rollouts of a store, newest first; after the first read, only new and unfinished ones are read again."""

    def __init__(self, store: TraceStore, run_id: str | None = None) -> None:
        """Read rollouts lazily; with `run_id`, only this run's."""
        self._store = store
        self.run_id = run_id
        self._by_id: dict[str, StoredRollout] = {}
        self._order: list[str] = []
        """Session ids, newest first."""
        self._others: set[str] = set()
        """Sessions of other runs."""
        self._read_at = 0.0
        self._lock = threading.Lock()

    def all(self) -> list[StoredRollout]:
        """Return the rollouts, at most a second old."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._refresh()
                self._read_at = time.monotonic()
            return [self._by_id[session_id] for session_id in self._order if session_id not in self._others]

    def choices(self) -> dict[str, list[str]]:
        """Return the values that rollouts can be filtered by: their roles, tools, badges and splits."""
        shown = self.all()
        found = {
            "roles": {role for rollout in shown for role in rollout.roles},
            "tools": {tool for rollout in shown for tool in rollout.tools},
            "badges": {word for rollout in shown for word, _ in rollout.badges},
            "splits": {rollout.split for rollout in shown if rollout.split},
        }
        return {name: sorted(values) for name, values in found.items()}

    def get(self, session_id: str) -> StoredRollout | None:
        """Return one rollout in its current state."""
        info = self._store.session(session_id)
        return None if info is None else rollout_of(info)

    def of_step(self, step: int, split: str = "train") -> list[StoredRollout]:
        """Return the rollouts of a step in the order of tasks and attempts."""
        found = [item for item in self.all() if item.step == step and item.split == split]
        return sorted(found, key=lambda item: (_natural(item.task_id), item.index, item.created_at))

    def of_task(self, task_id: str, split: str | None = None, step: int | None = None) -> list[StoredRollout]:
        """Return the rollouts of one task in order, of one evaluation if there were several."""
        return sorted(
            (
                item
                for item in self.all()
                if item.task_id == task_id and split in (None, item.split) and step in (None, item.step)
            ),
            key=lambda item: (item.step or 0, item.index),
        )

    def _refresh(self) -> None:
        if self._order and self._store.session(self._order[0]) is None:
            # A resumed run has deleted rollouts to repeat them.
            self._by_id, self._order = {}, []
        fresh: dict[str, None] = {}
        offset, is_known = 0, False
        # Growing pages, because a database scans to the offset of each.
        while not is_known and (page := self._store.sessions(limit=max(_PAGE, offset), offset=offset)):
            for info in page:
                if info.id not in self._by_id:
                    fresh[info.id] = None
                elif info.id not in fresh:  # otherwise a new session has shifted the pages
                    is_known = True
                self._keep(info)
            offset += len(page)
        self._order = [*fresh, *self._order]
        oldest = time.time() - _MAY_STILL_END_S
        for rollout in [self._by_id[session_id] for session_id in self._order[_PAGE:]]:
            may_end = not rollout.has_ended and rollout.split and rollout.created_at > oldest
            if may_end and rollout.session_id not in self._others:
                now = self._store.session(rollout.session_id)
                if now is not None:
                    self._keep(now)

    def _keep(self, info: SessionInfo) -> None:
        self._by_id[info.id] = rollout_of(info)
        if not may_be_of(info.metadata, self.run_id):
            self._others.add(info.id)


def rollout_of(info: SessionInfo) -> StoredRollout:
    """Return the rollout of a session; a session without a trainer has few fields."""
    about = info.metadata
    outcome = about.get(OUTCOME_KEY)
    step, split = _whole(about.get("training_step")), str(about.get("split", ""))
    session = {
        "session_id": info.id,
        "created_at": info.created_at,
        "num_calls": info.num_traces,
        "task_id": str(about.get("task_id", "")),
        "index": _whole(about.get("index")) or 0,
        "split": split,
        "step": step + 1 if step is not None and split == "train" else step,
        "has_ended": outcome is not None,
        "unreadable": None,
    }
    try:
        return convert({**({} if outcome is None else outcome), **session}, StoredRollout)
    except (ValidationError, TypeError) as error:  # TypeError: it is not even a mapping
        return convert({**session, "unreadable": str(error)}, StoredRollout)


def _whole(value: object) -> int | None:
    """Return a whole number, else `None`: metadata may have any value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _natural(task_id: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 10 after 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", task_id) if part]


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
SORTS: dict[str, Callable[[StoredRollout], float]] = {
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
        """Parse a query string."""
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

    def matches(self, rollout: StoredRollout) -> bool:
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

    rollouts: list[StoredRollout]
    total: int | None
    """Number of matches; `None` for a text, since all texts would have to be read."""
    next_offset: int | None
    """Offset of the next page."""
    num_read: int = 0
    """Number of rollouts whose texts were read."""


def search(
    rollouts: Iterable[StoredRollout],
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
    found: list[StoredRollout] = []
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
    for trace in traces:
        for parts in map(message_parts, (*trace.messages, trace.response)):
            calls = (f"{name} {arguments}" for name, arguments in parts.tools)
            if any(wanted in part.lower() for part in (parts.text, parts.reasoning, *calls)):
                return True
    return False
