"""Traces and credits to rows of the SQLite schema and back, and the statements that move them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

from rllm.store.base import SessionInfo
from rllm.store.codec import pack_document, pack_floats, pack_ids, unpack_document, unpack_floats, unpack_ids
from rllm.types import StepCredit, Trace

SESSION = "(SELECT seq FROM sessions WHERE id = ?)"

Row: TypeAlias = tuple[Any, ...]

MAX_ROWS = 32
"""Rows to a statement: enough that its overhead is shared, few enough that all sizes stay prepared."""

_TRACE_COLUMNS = (
    "id",
    "call_id",
    "choice_index",
    "parent_id",
    "model",
    "finish_reason",
    "weight_version",
    "template_hash",
    "logprobs_kind",
    "started_at",
    "error",
    "prompt_ids",
    "response_ids",
    "logprobs",
    "document",
)
_DOCUMENT_FIELDS = (
    "messages",
    "tools",
    "response",
    "sampling",
    "requested_sampling",
    "timings",
    "metadata",
    "weight_updates",
)
"""The fields that are kept together as one JSON document: they share most of their words, so they compress better."""

_CREDIT_COLUMNS = (
    "trace_id",
    "training_step",
    "episode_id",
    "trajectory_name",
    "reward",
    "group_id",
    "baseline",
    "advantage",
    "trainer_logprobs",
    "dropped",
)


@cache
def insert_sessions(count: int) -> str:
    """Create sessions (id, created_at) that are not there yet."""
    return f"INSERT INTO sessions (id, created_at) VALUES {', '.join(['(?, ?)'] * count)} ON CONFLICT (id) DO NOTHING"


@cache
def upsert_traces(count: int) -> str:
    """Write rows of `trace_to_row`."""
    return _upsert("traces", _TRACE_COLUMNS, ("session", "id"), count)


@cache
def upsert_credits(count: int) -> str:
    """Write rows of `credit_to_row`."""
    return _upsert("credits", _CREDIT_COLUMNS, ("session", "trace_id", "training_step"), count)


def _upsert(table: str, columns: Sequence[str], key: Sequence[str], count: int) -> str:
    """Insert rows, or where the key is there already, replace that row's values and keep its place."""
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    row = f"({SESSION}{', ?' * len(columns)})"
    return (
        f"INSERT INTO {table} (session, {', '.join(columns)}) VALUES {', '.join([row] * count)} "
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
    )


SELECT_TRACES = f"SELECT seq, {', '.join(_TRACE_COLUMNS)} FROM traces WHERE session = {SESSION}"
"""Unordered: SQLite would copy every blob to sort the rows, and the caller need not."""

SELECT_CREDITS = (
    f"SELECT {', '.join(f'credits.{name}' for name in _CREDIT_COLUMNS)} FROM credits "
    "LEFT JOIN traces ON traces.session = credits.session AND traces.id = credits.trace_id "
    f"WHERE credits.session = {SESSION} ORDER BY traces.seq IS NULL, traces.seq, credits.training_step"
)

SELECT_SESSIONS = (
    "SELECT id, created_at, (SELECT COUNT(*) FROM traces WHERE session = sessions.seq), metadata FROM sessions"
)


def trace_to_row(trace: Trace) -> Row:
    """The values that `upsert_traces` wants."""
    return (
        trace.session_id,
        trace.id,
        trace.call_id,
        trace.choice_index,
        trace.parent_id,
        trace.model,
        trace.finish_reason,
        trace.weight_version,
        trace.template_hash,
        trace.logprobs_kind,
        trace.started_at,
        trace.error,
        pack_ids(trace.prompt_ids),
        pack_ids(trace.response_ids),
        pack_floats(trace.logprobs),
        pack_document({name: getattr(trace, name) for name in _DOCUMENT_FIELDS}),
    )


def row_to_trace(row: Sequence[Any], session_id: str) -> Trace:
    """The trace of one row of `SELECT_TRACES`."""
    values = dict(zip(_TRACE_COLUMNS, row[1:], strict=True))
    document = unpack_document(values.pop("document"))
    for name, unpack in (("prompt_ids", unpack_ids), ("response_ids", unpack_ids), ("logprobs", unpack_floats)):
        values[name] = unpack(values[name])
    return Trace(session_id=session_id, **values, **document)


def credit_to_row(credit: StepCredit) -> Row:
    """The values that `upsert_credits` wants."""
    return (
        credit.session_id,
        credit.trace_id,
        credit.training_step,
        credit.episode_id,
        credit.trajectory_name,
        _number(credit.reward),
        credit.group_id,
        _number(credit.baseline),
        _number(credit.advantage),
        None if credit.trainer_logprobs is None else pack_floats(credit.trainer_logprobs),
        credit.dropped,
    )


def row_to_credit(row: Sequence[Any], session_id: str) -> StepCredit:
    """The credit of one row of `SELECT_CREDITS`."""
    values = dict(zip(_CREDIT_COLUMNS, row, strict=True))
    if values["trainer_logprobs"] is not None:
        values["trainer_logprobs"] = unpack_floats(values["trainer_logprobs"])
    return StepCredit(session_id=session_id, **values)


def row_to_session(row: Sequence[Any]) -> SessionInfo:
    """The session of one row of `SELECT_SESSIONS`."""
    session_id, created_at, num_traces, metadata = row
    return SessionInfo(
        id=session_id,
        created_at=created_at,
        num_traces=num_traces,
        metadata=unpack_document(metadata) if metadata is not None else {},
    )


def _number(value: Any) -> float | None:
    """A plain float of whatever number a trainer computed; SQLite takes no scalars of numpy."""
    return None if value is None else float(value)
