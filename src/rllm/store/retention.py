"""How long traces are kept: by age and by size, the oldest sessions going first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from rllm.errors import ConfigError, RLLMError, counted
from rllm.store.base import SessionInfo, TraceStore, every_session, session_pages

logger = logging.getLogger(__name__)

_DAY_S = 86_400.0
_GB = 1e9
_IN_USE_S = 3600.0
"""A session whose last call is younger than this is never deleted to make room: its agent may be at work."""
_PAGE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept. `None` is no limit."""

    keep_days: float | None = None
    """Days after a session's last call."""
    max_gb: float | None = None
    """10^9 bytes that the traces may take. A SQLite file never shrinks: room that was freed is used again."""

    def __post_init__(self) -> None:
        for name, value in (("keep_days", self.keep_days), ("max_gb", self.max_gb)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: use a number above 0, or leave it out to keep everything")

    def __bool__(self) -> bool:
        return self.keep_days is not None or self.max_gb is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What was deleted."""

    num_sessions: int = 0
    num_traces: int = 0

    def __str__(self) -> str:
        return f"{counted(self.num_sessions, 'session')} with {counted(self.num_traces, 'trace')}"

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            num_sessions=self.num_sessions + other.num_sessions, num_traces=self.num_traces + other.num_traces
        )


def prune(store: TraceStore, retention: Retention, *, is_over: Callable[[], bool] = lambda: False) -> Pruned:
    """Delete the sessions that are too old, and the oldest ones while the rest takes too much room; as far as it has come once
    `is_over` says so, which is asked after every few hundred."""
    pruned = Pruned()
    if retention.keep_days is not None:
        pruned += _delete_unused_since(store, time.time() - retention.keep_days * _DAY_S, is_over)
    if retention.max_gb is not None:
        pruned += _make_room(store, int(retention.max_gb * _GB), is_over)
    if pruned.num_sessions:
        logger.info("deleted %s: %s", pruned, retention)
    return pruned


@contextmanager
def pruning(store: TraceStore, retention: Retention, *, every_s: float = 600.0) -> Iterator[None]:
    """Prune now and again in a thread, for as long as the block runs."""
    if not retention:
        yield
        return
    done = threading.Event()

    def run() -> None:
        while True:
            try:
                prune(store, retention, is_over=done.is_set)
            except RLLMError as error:
                logger.warning("old traces could not be deleted, which is tried again: %s", error)
            if done.wait(every_s):
                return

    thread = threading.Thread(target=run, name="rllm-retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def delete_sessions(store: TraceStore, session_ids: Sequence[str]) -> Pruned:
    """Delete sessions; those deleted at once share a commit."""
    with ThreadPoolExecutor(16) as pool:
        return Pruned(num_sessions=len(session_ids), num_traces=sum(pool.map(store.delete, session_ids)))


def _unused_since(store: TraceStore, sessions: Sequence[SessionInfo], moment: float) -> list[str]:
    return [info.id for info in sessions if max(info.created_at, store.last_call_at(info.id) or 0.0) < moment]


def _delete_unused_since(store: TraceStore, moment: float, is_over: Callable[[], bool]) -> Pruned:
    pruned = Pruned()
    for page in session_pages(store, oldest_first=True, created_before=moment):
        if is_over():
            break
        pruned += delete_sessions(store, _unused_since(store, page, moment))
    return pruned


def _make_room(store: TraceStore, max_bytes: int, is_over: Callable[[], bool]) -> Pruned:
    used, pruned, num_kept = store.num_bytes(), Pruned(), 0
    if used <= max_bytes:
        return pruned
    num_sessions = sum(1 for _ in every_session(store, oldest_first=True))
    while used > max_bytes and not is_over():
        page = store.sessions(limit=_PAGE, offset=num_kept, oldest_first=True)
        if not page:
            logger.warning("the store takes %d bytes, above the limit of %d: the rest is in use", used, max_bytes)
            break
        # As many as it takes if all sessions were alike; then it is measured again.
        num_wanted = max(1, round((1 - max_bytes / used) * (num_sessions - pruned.num_sessions)))
        unused = _unused_since(store, page[:num_wanted], time.time() - _IN_USE_S)
        pruned += delete_sessions(store, unused)
        num_kept += len(page[:num_wanted]) - len(unused)
        used = store.num_bytes()
    return pruned
