"""Sessions from one store to another, whole: with their age, metadata, traces and credits; and read back to be sure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, TypeVar

from rllm.errors import StoreError
from rllm.store.base import SessionInfo, TraceStore, session_pages
from rllm.store.codec import column_text, pack_floats
from rllm.types import StepCredit, Trace

R = TypeVar("R", Trace, StepCredit)

_PAGE = 64
"""Sessions that are under way at once: they share commits."""
_FLOATS = ("logprobs", "trainer_logprobs")
"""Fields of many numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """How far a copy has come."""

    num_sessions: int = 0
    num_traces: int = 0
    num_skipped: int = 0
    """Sessions that were there already, from an attempt before."""


def copy_store(source: TraceStore, target: TraceStore, on_progress: Callable[[Copied], None]) -> Copied:
    """Copy every session, oldest first. What is the same in the target already is skipped, so a copy may be begun again.

    Raises:
        StoreError: if the target has other traces in a session of the same id, which stays as it is; or if one is not the
            same afterwards.
    """
    copied = Copied()
    for page in session_pages(source, oldest_first=True, page_size=_PAGE):
        missing = [info for info in page if not _is_same(source, target, info)]
        for info in missing:
            _refuse_others(source, target, info)
        _copy(source, target, missing)
        for info in missing:
            _check(source, target, info)
        copied = Copied(
            num_sessions=copied.num_sessions + len(missing),
            num_traces=copied.num_traces + sum(info.num_traces for info in missing),
            num_skipped=copied.num_skipped + len(page) - len(missing),
        )
        on_progress(copied)
    return copied


def _is_same(source: TraceStore, target: TraceStore, info: SessionInfo) -> bool:
    found = target.session(info.id)
    return (
        found is not None
        and (found.num_traces, found.metadata) == (info.num_traces, info.metadata)
        and _as_held(target.credits(info.id)) == _as_held(source.credits(info.id))
        and _as_held(target.by_session(info.id)) == _as_held(source.by_session(info.id))
    )


def _refuse_others(source: TraceStore, target: TraceStore, info: SessionInfo) -> None:
    """An interrupted copy has only traces of the source; any other belongs to whoever writes to the target."""
    if found := target.by_session(info.id):
        known = {column_text(trace.id) for trace in source.by_session(info.id)}
        if any(column_text(trace.id) not in known for trace in found):
            raise _differs(info)


def _copy(source: TraceStore, target: TraceStore, sessions: list[SessionInfo]) -> None:
    _wait(target.open_session(info.id, info.metadata, created_at=info.created_at) for info in sessions)
    # Turn by turn, because a turn is kept as what it adds to those that are durable.
    for turn in zip_longest(*(source.by_session(info.id) for info in sessions)):
        _wait(target.add([trace]) for trace in turn if trace is not None)
    _wait(target.annotate(source.credits(info.id)) for info in sessions)


def _wait(writes: Iterable[Future[None]]) -> None:
    for write in list(writes):
        write.result()


def _check(source: TraceStore, target: TraceStore, info: SessionInfo) -> None:
    # What was written to meanwhile is copied by the next run.
    if not _is_same(source, target, info) and source.session(info.id) == info:
        raise _differs(info)


def _differs(info: SessionInfo) -> StoreError:
    return StoreError(
        f"session {info.id!r} is not the same in the target as in the source: the target had other traces of that "
        "session before; delete it there (`rllm traces delete`), or copy into an empty store"
    )


def _as_held(records: list[R]) -> list[R]:
    """As every database holds them, and so that equal ones compare as equal."""
    return [replace(record, **_held_fields(record)) for record in records]


def _held_fields(record: Trace | StepCredit) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: _held(value) for name, value in values.items() if isinstance(value, str | float) or name in _FLOATS}


def _held(value: Any) -> Any:
    """What agents and servers write may have characters that PostgreSQL's columns have not; and a number that is none, which
    SQLite's have not, equals nothing, not even itself."""
    if isinstance(value, str):
        return column_text(value)
    if isinstance(value, float):
        return value if value == value else None
    return value and pack_floats(value)
