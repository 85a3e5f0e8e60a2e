"""Rollouts of a run, from the metadata of their sessions: no trace is read to list, sort or filter them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec import field as struct_field

from rllm.engine.episode_log import plain_task_id
from rllm.store.base import SessionInfo, TraceStore, may_be_of
from rllm.types import OUTCOME_KEY


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
    advantage: float | None = None
    dropped: str | None = None
    trainable: bool = True
    truncated: bool = False
    num_tokens: int = 0
    tools: list[str] = []
    steps: list[StepOutcome] = []


class Outcome(Struct, kw_only=True, gc=False):
    """Outcome of a rollout. There are many and they have no cycles, so the garbage collector skips them."""

    ended: str | None = None
    is_correct: Any = False
    """Any truthy value counts as correct."""
    error: dict[str, str] | None = None
    warnings: list[str] = []
    metrics: dict[str, Any] = {}
    paths: list[PathOutcome] = struct_field(default=[], name="trajectories")


def read_outcome(stored: object) -> tuple[Outcome, str | None]:
    """Read an outcome from the metadata of a session; also return what is wrong with it, if it is invalid."""
    try:
        return convert(stored, Outcome), None
    except ValidationError as error:
        return Outcome(), str(error)


RUNNING = "running"
"""Badge of a rollout that has not ended, the only one that is removed later."""
_PAGE = 1000
_FRESH_S = 1.0
"""Seconds for which read data counts as fresh."""
_MAY_STILL_END_S = 6 * 3600.0
"""Age after which an unfinished rollout is not checked again."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One session of the store."""

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
    ended: str | None = None
    is_correct: bool = False
    error: Mapping[str, str] | None = None
    warnings: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[PathOutcome] = ()
    unreadable: str | None = None
    """Reason that its outcome cannot be read."""

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

    @property
    def tools(self) -> list[str]:
        return sorted({tool for path in self.paths for tool in path.tools})

    @cached_property
    def drifts(self) -> list[str]:
        """Causes of prompts that do not continue sampled tokens, one for each such call."""
        return [step.drift for path in self.paths for step in path.steps if step.drift is not None]

    @property
    def badges(self) -> list[tuple[str, str]]:
        """Badges: a word and a sentence each."""
        found = []
        if not self.has_ended:
            found.append((RUNNING, "no outcome was recorded: it is running, or its run was stopped"))
        if self.error:
            found.append(("failed", f"{self.error.get('type', '')}: {self.error.get('message', '')}"[:300]))
        if self.unreadable:
            found.append(("unreadable", f"its outcome cannot be read: {self.unreadable}"))
        if any(path.truncated for path in self.paths):
            found.append(("truncated", "an answer was truncated at its maximum length"))
        reasons = {path.dropped for path in self.paths if path.dropped}
        found += [(reason.replace("_", " "), f"left out of training: {reason}") for reason in sorted(reasons)]
        if self.has_ended and not self.error and not self.unreadable and self.reward is None:
            found.append(("unscored", "it has no reward"))
        if self.drifts:
            found.append(("drift", f"prompts differ from the sampled tokens: {', '.join(sorted(set(self.drifts)))}"))
        return list({word: (word, text) for word, text in found}.values())


@dataclass
class Choices:
    """Values that rollouts can be filtered by."""

    roles: set[str] = field(default_factory=set)
    tools: set[str] = field(default_factory=set)
    badges: set[str] = field(default_factory=set)
    splits: set[str] = field(default_factory=set)

    def add(self, rollout: Rollout) -> None:
        self.roles.update(rollout.roles)
        self.tools.update(rollout.tools)
        self.badges.update(word for word, _ in rollout.badges if word != RUNNING)
        if rollout.split:
            self.splits.add(rollout.split)


class Rollouts:
    """All rollouts of a store, newest first; after the first read, only new and unfinished ones are read again."""

    def __init__(self, store: TraceStore, run_id: str | None = None) -> None:
        """Read rollouts lazily; with `run_id`, only those of this run."""
        self._store = store
        self.run_id = run_id
        self._by_id: dict[str, Rollout] = {}
        self._order: list[str] = []
        """Session ids, newest first."""
        self._choices = Choices()
        self._not_in_choices: dict[str, Rollout] = {}
        self._running: set[str] = set()
        self._others: set[str] = set()
        """Sessions of other runs."""
        self._read_at = 0.0
        self._lock = threading.Lock()

    def all(self) -> list[Rollout]:
        """Return the rollouts, at most a second old."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._refresh()
                self._read_at = time.monotonic()
            return [self._by_id[session_id] for session_id in self._order if session_id not in self._others]

    def choices(self) -> Choices:
        """Return the values of all rollouts read so far; each rollout is inspected once."""
        with self._lock:
            for rollout in self._not_in_choices.values():
                self._choices.add(rollout)
            self._not_in_choices.clear()
            now = {RUNNING} if self._running else set()
            return replace(self._choices, badges=self._choices.badges | now)

    def get(self, session_id: str) -> Rollout | None:
        """Return one rollout in its current state."""
        info = self._store.session(session_id)
        return None if info is None else rollout_of(info)

    def of_step(self, step: int, split: str = "train") -> list[Rollout]:
        """Return the rollouts of a step in the order of tasks and attempts."""
        found = [item for item in self.all() if item.step == step and item.split == split]
        return sorted(found, key=lambda item: (_natural(item.task_id), item.index, item.created_at))

    def of_task(self, task_id: str, split: str | None = None, step: int | None = None) -> list[Rollout]:
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
            self._by_id, self._order, self._choices, self._not_in_choices = {}, [], Choices(), {}
            self._running.clear()
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
        for rollout in self._unfinished(self._order[_PAGE:]):
            now = self._store.session(rollout.session_id)
            if now is not None:
                self._keep(now)

    def _keep(self, info: SessionInfo) -> None:
        rollout = self._by_id[info.id] = rollout_of(info)
        if not may_be_of(info.metadata, self.run_id):
            self._others.add(info.id)
            return
        self._not_in_choices[info.id] = rollout
        (self._running.discard if rollout.has_ended else self._running.add)(info.id)

    def _unfinished(self, session_ids: Iterable[str]) -> list[Rollout]:
        oldest = time.time() - _MAY_STILL_END_S
        found = (self._by_id[session_id] for session_id in session_ids if session_id not in self._others)
        return [item for item in found if not item.has_ended and item.split and item.created_at > oldest]


def rollout_of(info: SessionInfo) -> Rollout:
    """Return the rollout of a session; a session without a trainer has few fields."""
    about = info.metadata
    stored = about.get(OUTCOME_KEY)
    outcome, unreadable = (Outcome(), None) if stored is None else read_outcome(stored)
    step, split = _whole(about.get("training_step")), str(about.get("split", ""))
    if step is not None and split == "train":
        step += 1
    return Rollout(
        session_id=info.id,
        created_at=info.created_at,
        num_calls=info.num_traces,
        task_id=str(about.get("task_id", "")),
        index=_whole(about.get("index")) or 0,
        split=split,
        step=step,
        has_ended=stored is not None,
        ended=outcome.ended,
        is_correct=bool(outcome.is_correct),
        error=outcome.error,
        warnings=outcome.warnings,
        metrics=outcome.metrics,
        paths=outcome.paths,
        unreadable=unreadable,
    )


def _whole(value: object) -> int | None:
    """Return a whole number, else `None`: metadata may have any value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _natural(task_id: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 10 after 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", task_id) if part]
