"""Trace store in the memory of this process, for tests and for runs whose traces are not needed afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from operator import gt, lt
from types import TracebackType

from rllm.errors import StoreError
from rllm.store.base import SessionInfo, SessionRef
from rllm.store.rows import EncodedTrace, trace_to_row
from rllm.types import JSONMapping, JSONObject, StepCredit, Trace


@dataclass
class _Session:
    number: int
    created_at: float
    metadata: JSONObject = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)
    credits: dict[tuple[str, int, int], StepCredit] = field(default_factory=dict)


class MemoryTraceStore:
    """The `TraceStore` protocol over dictionaries. Writes are complete when they return."""

    is_local = True

    def __init__(self) -> None:
        # Both levels rely on the order of dictionaries: insertion order, which replacing a value keeps.
        self._sessions: dict[str, _Session] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._closed = False

    def add(self, traces: Sequence[Trace], *, session: SessionRef | None = None) -> Future[None]:
        with self._opened():
            if session is not None and traces:
                found = self._sessions.get(traces[0].session_id)
                if refused := session.refusal(traces[0].session_id, found.number if found else None):
                    return _done(refused)
            for trace in traces:
                added_to = self._session(trace.session_id)
                added_to.traces[trace.id] = replace(trace, prompt_ids=list(trace.prompt_ids))
                if session is not None:
                    session.number = added_to.number
        return _done()

    def open_session(
        self,
        session_id: str,
        metadata: JSONMapping,
        *,
        created_at: float | None = None,
        session: SessionRef | None = None,
    ) -> Future[None]:
        with self._opened():
            opened = self._session(session_id, created_at)
            opened.metadata.update(metadata)
            if session is not None and session.number is None:
                session.number = opened.number
        return _done()

    def session(self, session_id: str) -> SessionInfo | None:
        with self._opened():
            session = self._sessions.get(session_id)
            return _info(session_id, session) if session else None

    def sessions(
        self, *, limit: int = 100, offset: int = 0, oldest_first: bool = False, beyond: int | None = None
    ) -> list[SessionInfo]:
        with self._opened():
            items = list(self._sessions.items())
            ordered = items if oldest_first else items[::-1]
            is_beyond = gt if oldest_first else lt
            found = [
                (name, session) for name, session in ordered if beyond is None or is_beyond(session.number, beyond)
            ]
            return [_info(*item) for item in found[offset : offset + limit]]

    def by_session(self, session_id: str) -> list[Trace]:
        with self._opened():
            session = self._sessions.get(session_id)
            return list(session.traces.values()) if session else []

    def trace(self, session_id: str, trace_id: str) -> Trace | None:
        with self._opened():
            session = self._sessions.get(session_id)
            return session.traces.get(trace_id) if session else None

    def last_call_at(self, session_id: str) -> float | None:
        return max((trace.started_at for trace in self.by_session(session_id)), default=None)

    def session_of(self, trace_id: str) -> str | None:
        with self._opened():
            return next((name for name, session in self._sessions.items() if trace_id in session.traces), None)

    def annotate(self, credits: Sequence[StepCredit]) -> Future[None]:
        with self._opened():
            for credit in credits:
                if session := self._sessions.get(credit.session_id):
                    session.credits[credit.trace_id, credit.training_step, credit.trajectory_index] = credit
        return _done()

    def credits(self, session_id: str) -> list[StepCredit]:
        with self._opened():
            session = self._sessions.get(session_id)
            if session is None:
                return []
            order = {trace_id: position for position, trace_id in enumerate(session.traces)}
            return sorted(
                session.credits.values(),
                key=lambda item: (order.get(item.trace_id, len(order)), item.training_step, item.trajectory_index),
            )

    def delete(self, session_id: str) -> int:
        with self._opened():
            session = self._sessions.pop(session_id, None)
            return len(session.traces) if session else 0

    def num_bytes(self) -> int:
        """Return the approximate size of the same traces in a file."""
        with self._opened():
            traces = [trace for session in self._sessions.values() for trace in session.traces.values()]
        rows = (trace_to_row(EncodedTrace.of(trace), session=0) for trace in traces)
        return sum(len(value) for row in rows for value in row if isinstance(value, bytes))

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> MemoryTraceStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _session(self, session_id: str, created_at: float | None = None) -> _Session:
        found = self._sessions.get(session_id)
        if found is None:
            found = self._sessions[session_id] = _Session(next(self._numbers), created_at or time.time())
        return found

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreError("this trace store is closed: open a new one")
            yield


def _info(session_id: str, session: _Session) -> SessionInfo:
    return SessionInfo(
        id=session_id,
        created_at=session.created_at,
        num_traces=len(session.traces),
        metadata=dict(session.metadata),
        number=session.number,
    )


def _done(error: Exception | None = None) -> Future[None]:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future
