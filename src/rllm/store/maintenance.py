"""Work on whole stores: copying sessions to another store, exporting traces to files, and deleting old sessions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal, TypeAlias

from rllm._runtime.files import new_file
from rllm.errors import ConfigError, RLLMError, StoreError, counted, needed
from rllm.store.base import SessionInfo, TraceStore, every_session, session_pages
from rllm.store.codec import any_to_json, column_text, plain_text
from rllm.store.rows import kinds_of
from rllm.types import JSONObject, StepCredit, Trace

ExportFormat: TypeAlias = Literal["jsonl", "parquet"]

logger = logging.getLogger(__name__)

_COPIED_AT_ONCE = 64
"""Sessions that are copied together, so that they share commits."""
_ROWS_PER_GROUP = 1000
"""Rows of a Parquet file that are in memory at a time."""
_DAY_S = 86_400.0
_GB = 1e9
_IN_USE_S = 3600.0
"""Seconds after its last call in which a session is not deleted to make room: its agent may still be running."""
_PAGE = 256


# Copying


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyProgress:
    """Progress of a copy."""

    num_sessions: int = 0
    num_traces: int = 0
    num_skipped: int = 0
    """Sessions that the target had already, from an interrupted copy."""


def copy_store(source: TraceStore, target: TraceStore, on_progress: Callable[[CopyProgress], None]) -> CopyProgress:
    """Copy every session with its age, metadata, traces and credits, oldest first, and compare it afterwards.

    Sessions that are equal in the target are skipped, so that an interrupted copy can be started again.

    Raises:
        StoreError: if the target has other traces in a session of the same id, which stays unchanged; or if a copied
            session differs.
    """
    progress = CopyProgress()
    for page in session_pages(source, oldest_first=True, page_size=_COPIED_AT_ONCE):
        missing = [info for info in page if not _is_same(source, target, info)]
        for info in missing:
            # Traces that do not come from an interrupted copy of this session.
            known = {column_text(trace.id) for trace in source.by_session(info.id)}
            if any(column_text(trace.id) not in known for trace in target.by_session(info.id)):
                raise _differs(info)
        _wait(target.open_session(info.id, info.metadata, created_at=info.created_at) for info in missing)
        # Turn by turn, because a turn is stored as a difference from turns that are already durable.
        for turn in zip_longest(*(source.by_session(info.id) for info in missing)):
            _wait(target.add([trace]) for trace in turn if trace is not None)
        _wait(target.annotate(source.credits(info.id)) for info in missing)
        for info in missing:
            # A session that was written to meanwhile is copied by the next run.
            if not _is_same(source, target, info) and source.session(info.id) == info:
                raise _differs(info)
        progress = CopyProgress(
            num_sessions=progress.num_sessions + len(missing),
            num_traces=progress.num_traces + sum(info.num_traces for info in missing),
            num_skipped=progress.num_skipped + len(page) - len(missing),
        )
        on_progress(progress)
    return progress


def _is_same(source: TraceStore, target: TraceStore, info: SessionInfo) -> bool:
    found = target.session(info.id)
    return (
        found is not None
        and (found.num_traces, found.metadata) == (info.num_traces, info.metadata)
        and _comparable(target.credits(info.id)) == _comparable(source.credits(info.id))
        and _comparable(target.by_session(info.id)) == _comparable(source.by_session(info.id))
    )


def _wait(writes: Iterable[Future[None]]) -> None:
    for write in list(writes):
        write.result()


def _differs(info: SessionInfo) -> StoreError:
    return StoreError(
        f"session {info.id!r} differs between source and target, which has other traces of it: delete it in the "
        "target (`rllm traces delete`), or copy into an empty store"
    )


def _comparable(records: Sequence[Trace] | Sequence[StepCredit]) -> list[bytes]:
    """Return records as JSON, in which values that some databases cannot hold (NUL, NaN) equal their replacements."""
    values = ({item.name: getattr(record, item.name) for item in fields(record)} for record in records)
    return [any_to_json(record).replace(rb"\u0000", rb"\\x00") for record in values]


# Exporting


def export_traces(traces: Iterable[Trace], path: Path, kind: ExportFormat) -> int:
    """Write traces to a file that appears in one step, and return their number.

    JSON lines have one object for each trace, with the fields of `Trace`. A Parquet file has these fields as columns;
    those without a fixed type are JSON text.

    Raises:
        ConfigError: if the file cannot be written.
        MissingDependencyError: for Parquet without `pyarrow`.
    """
    try:
        with new_file(path) as new:
            if kind == "parquet":
                return _write_parquet(traces, new)
            count = 0
            with new.open("wb") as file:
                for trace in traces:
                    file.write(any_to_json(trace.to_dict()) + b"\n")
                    count += 1
            return count
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror or error}): choose another path"
        ) from error


def _write_parquet(traces: Iterable[Trace], path: Path) -> int:
    with needed("pyarrow", "data", "writing Parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    types = {
        "text": pa.string(),
        "integer": pa.int64(),
        "real": pa.float64(),
        "ids": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
    }
    columns = {name: types[kind] for name, kind in kinds_of(Trace).items() if kind is not None}
    schema = pa.schema([(item.name, columns.get(item.name, pa.string())) for item in fields(Trace)])
    count, remaining = 0, iter(traces)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := [_parquet_row(trace, columns) for trace in islice(remaining, _ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _parquet_row(trace: Trace, columns: Container[str]) -> JSONObject:
    row = {name: plain_text(value) if isinstance(value, str) else value for name, value in trace.to_dict().items()}
    return {name: value if name in columns else any_to_json(value).decode() for name, value in row.items()}


# Deleting old sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Limits for the traces that are kept; `None` means no limit."""

    keep_days: float | None = None
    """Delete sessions whose last call is older than this many days."""
    max_gb: float | None = None
    """Delete the oldest sessions above this size in 10^9 bytes; a SQLite file never shrinks, but reuses its space."""

    def __post_init__(self) -> None:
        for name, value in (("keep_days", self.keep_days), ("max_gb", self.max_gb)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: use a number above 0, or leave it out to keep everything")

    def __bool__(self) -> bool:
        return self.keep_days is not None or self.max_gb is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Numbers of deleted sessions and traces."""

    num_sessions: int = 0
    num_traces: int = 0

    def __str__(self) -> str:
        return f"{counted(self.num_sessions, 'session')} with {counted(self.num_traces, 'trace')}"

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            num_sessions=self.num_sessions + other.num_sessions, num_traces=self.num_traces + other.num_traces
        )


def prune(store: TraceStore, retention: Retention, *, is_over: Callable[[], bool] = lambda: False) -> Pruned:
    """Delete the sessions that are too old, then the oldest ones while the rest is too large.

    `is_over` is called after every few hundred sessions; once it returns true, the work ends early.
    """
    pruned = Pruned()
    if retention.keep_days is not None:
        moment = time.time() - retention.keep_days * _DAY_S
        for page in session_pages(store, oldest_first=True):
            if is_over():
                break
            pruned += delete_sessions(store, _unused_since(store, page, moment))
    if retention.max_gb is not None:
        pruned += _make_room(store, int(retention.max_gb * _GB), is_over)
    if pruned.num_sessions:
        logger.info("deleted %s (keep_days=%s, max_gb=%s)", pruned, retention.keep_days, retention.max_gb)
    return pruned


@contextmanager
def pruning(store: TraceStore, retention: Retention, *, every_s: float = 600.0) -> Iterator[None]:
    """Prune periodically in a thread while the block runs."""
    if not retention:
        yield
        return
    done = threading.Event()

    def run() -> None:
        while True:
            try:
                prune(store, retention, is_over=done.is_set)
            except RLLMError as error:
                logger.warning("old traces could not be deleted, trying again later: %s", error)
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
    """Delete sessions; several at once share a commit."""
    with ThreadPoolExecutor(16) as pool:
        return Pruned(num_sessions=len(session_ids), num_traces=sum(pool.map(store.delete, session_ids)))


def _unused_since(store: TraceStore, sessions: Sequence[SessionInfo], moment: float) -> list[str]:
    older = (info.id for info in sessions if info.created_at < moment)
    return [session_id for session_id in older if (store.last_call_at(session_id) or 0.0) < moment]


def _make_room(store: TraceStore, max_bytes: int, is_over: Callable[[], bool]) -> Pruned:
    used, pruned, num_kept = store.num_bytes(), Pruned(), 0
    if used <= max_bytes:
        return pruned
    num_sessions = sum(1 for _ in every_session(store, oldest_first=True))
    while used > max_bytes and not is_over():
        page = store.sessions(limit=_PAGE, offset=num_kept, oldest_first=True)
        if not page:
            logger.warning(
                "the store has %d bytes, more than max_gb allows (%d): its other sessions are in use", used, max_bytes
            )
            break
        # As many as needed if all sessions had the same size; then the size is measured again.
        num_wanted = max(1, round((1 - max_bytes / used) * (num_sessions - pruned.num_sessions)))
        unused = _unused_since(store, page[:num_wanted], time.time() - _IN_USE_S)
        pruned += delete_sessions(store, unused)
        num_kept += len(page[:num_wanted]) - len(unused)
        used = store.num_bytes()
    return pruned
