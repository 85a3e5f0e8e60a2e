"""The rollouts of a run, as the metadata of their sessions tell of them: no trace is read to list, sort or filter them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rllm.engine.episode_log import plain_task_id
from rllm.store.base import SessionInfo, TraceStore, may_be_of
from rllm.types import OUTCOME_KEY
from rllm.viewer.outcomes import Outcome, Path, read_outcome

RUNNING = "running"
"""The badge of a rollout that has not ended: the only one that goes again."""
_PAGE = 1000
_FRESH_S = 1.0
"""Seconds for which what was read is good enough."""
_MAY_STILL_END_S = 6 * 3600.0
"""Age after which a rollout that never ended is not looked at again."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One session of the store."""

    session_id: str
    created_at: float
    num_calls: int
    task_id: str = ""
    """With the step that it was made for behind an @, as the trainer has it."""
    index: int = 0
    split: str = ""
    step: int | None = None
    """As metrics count: the training step, or after how many of them it evaluates."""
    has_ended: bool = False
    ended: str | None = None
    is_correct: bool = False
    error: Mapping[str, str] | None = None
    warnings: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[Path] = ()
    unreadable: str | None = None
    """What is wrong with what was noted of its end."""

    @property
    def title(self) -> str:
        return f"{self.task_name} · {self.index}" if self.task_id else self.session_id

    @property
    def task_name(self) -> str:
        """The task without the step that it was taken for."""
        return plain_task_id(self.task_id) if self.split == "train" else self.task_id

    @cached_property
    def reward(self) -> float | None:
        """The mean over its agents; `None`: nobody scored it."""
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
        """Why prompts did not go on from what was sampled, one for each call of which that is so."""
        return [step.drift for path in self.paths for step in path.steps if step.drift is not None]

    @property
    def badges(self) -> list[tuple[str, str]]:
        """What sets it apart: a word, and a sentence."""
        found = []
        if not self.has_ended:
            found.append((RUNNING, "no outcome was recorded: it is under way, or its run was stopped"))
        if self.error:
            found.append(("failed", f"{self.error.get('type', '')}: {self.error.get('message', '')}"[:300]))
        if self.unreadable:
            found.append(("unreadable", f"what was noted of its end cannot be read: {self.unreadable}"))
        if any(path.truncated for path in self.paths):
            found.append(("truncated", "an answer was cut off at its maximal length"))
        reasons = {path.dropped for path in self.paths if path.dropped}
        found += [(reason.replace("_", " "), f"left out of training: {reason}") for reason in sorted(reasons)]
        if self.has_ended and not self.error and not self.unreadable and self.reward is None:
            found.append(("unscored", "nobody gave it a reward"))
        if self.drifts:
            found.append(("drift", f"prompts differ from what was sampled: {', '.join(sorted(set(self.drifts)))}"))
        return list({word: (word, told) for word, told in found}.values())


@dataclass
class Choices:
    """What rollouts can be filtered by."""

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
    """All rollouts of a store, newest first; read once, and then only what is new or was not over."""

    def __init__(self, store: TraceStore, run_id: str | None = None) -> None:
        """With `run_id` those of other training runs are left out."""
        self._store = store
        self.run_id = run_id
        self._by_id: dict[str, Rollout] = {}
        self._order: list[str] = []
        """Newest first."""
        self._choices = Choices()
        self._not_in_choices: dict[str, Rollout] = {}
        self._running: set[str] = set()
        self._others: set[str] = set()
        """Sessions of other runs."""
        self._read_at = 0.0
        self._lock = threading.Lock()

    def all(self) -> list[Rollout]:
        """As of a second ago at most."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._refresh()
                self._read_at = time.monotonic()
            return [self._by_id[session_id] for session_id in self._order if session_id not in self._others]

    def choices(self) -> Choices:
        """Of all that was read so far; each rollout is looked at once."""
        with self._lock:
            for rollout in self._not_in_choices.values():
                self._choices.add(rollout)
            self._not_in_choices.clear()
            now = {RUNNING} if self._running else set()
            return replace(self._choices, badges=self._choices.badges | now)

    def get(self, session_id: str) -> Rollout | None:
        """One of them, as it is now."""
        info = self._store.session(session_id)
        return None if info is None else rollout_of(info)

    def of_step(self, step: int, split: str = "train") -> list[Rollout]:
        """In the order of tasks and attempts."""
        found = [item for item in self.all() if item.step == step and item.split == split]
        return sorted(found, key=lambda item: (_natural(item.task_id), item.index, item.created_at))

    def of_task(self, task_id: str, split: str | None = None, step: int | None = None) -> list[Rollout]:
        """The attempts at one task, in their order; of one evaluation, where there were several."""
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
            # A resumed run has deleted what it makes again.
            self._by_id, self._order, self._choices, self._not_in_choices = {}, [], Choices(), {}
            self._running.clear()
        fresh: dict[str, None] = {}
        offset, is_known = 0, False
        # Pages that grow, because a database counts to where each begins.
        while not is_known and (page := self._store.sessions(limit=max(_PAGE, offset), offset=offset)):
            for info in page:
                if info.id not in self._by_id:
                    fresh[info.id] = None
                elif info.id not in fresh:  # else a session that began meanwhile has shifted the pages
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
    """What a session says; one that no trainer made has next to nothing."""
    about = info.metadata
    told = about.get(OUTCOME_KEY)
    outcome, unreadable = (Outcome(), None) if told is None else read_outcome(told)
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
        has_ended=told is not None,
        ended=outcome.ended,
        is_correct=bool(outcome.is_correct),
        error=outcome.error,
        warnings=outcome.warnings,
        metrics=outcome.metrics,
        paths=outcome.paths,
        unreadable=unreadable,
    )


def _whole(value: object) -> int | None:
    """A whole number; anything else, which whoever opens a session may say, is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _natural(task_id: str) -> list[tuple[int, str]]:
    """Sorts 10 behind 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", task_id) if part]
