"""Traces and credits to rows of the SQL stores and back, and the statements that both databases understand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TypeAlias

from rllm._runtime.untrusted import TooLargeError
from rllm.store.base import SessionInfo
from rllm.store.codec import UNREADABLE, pack_floats, plain_text, unpack_document, unpack_floats, unpack_ids
from rllm.store.turns import HEAD, PackedTrace, draft_of, pack, unpack_document_of
from rllm.types import StepCredit, Trace

SCHEMA = 3
"""The version of the tables that this module speaks of; 1 had no `base` and no `digest`, and 2 one credit for a step."""

_MAX_BYTES = 2 * 1024 * 1024 * 1024
"""Of one session's traces, unpacked; each of a few bytes may stand for as many as another one has."""

SESSION = "(SELECT seq FROM sessions WHERE id = ?)"

Row: TypeAlias = tuple[Any, ...]

TRACE_COLUMNS = (
    *HEAD[1:],
    "prompt_ids",
    "response_ids",
    "logprobs",
    "document",
    "digest",
)

CREDIT_COLUMNS = (
    "trace_id",
    "training_step",
    "trajectory_index",
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
def insert_traces(count: int) -> str:
    """Takes rows of `TRACE_COLUMNS` behind the `seq` of the session, and that of the base or NULL."""
    row = f"(?, ?{', ?' * len(TRACE_COLUMNS)})"
    return f"INSERT INTO traces (session, base, {', '.join(TRACE_COLUMNS)}) VALUES {', '.join([row] * count)}"


FIND_TRACE = f"SELECT seq FROM traces WHERE session = {SESSION} AND id = ?"

IS_A_BASE = f"SELECT 1 FROM traces WHERE session = {SESSION} AND base = ? LIMIT 1"

UPSERT_CREDIT = (
    f"INSERT INTO credits (session, {', '.join(CREDIT_COLUMNS)}) VALUES ({SESSION}{', ?' * len(CREDIT_COLUMNS)}) "
    "ON CONFLICT (session, trace_id, training_step, trajectory_index) DO UPDATE SET "
    f"{', '.join(f'{name} = excluded.{name}' for name in CREDIT_COLUMNS[3:])}"
)
"""Takes a row of `credit_to_row`."""

UPDATE_TRACE = f"UPDATE traces SET base = NULL, {', '.join(f'{name} = ?' for name in TRACE_COLUMNS)} WHERE seq = ?"
"""Put what stands alone in the place of a row."""


def select_traces(schema: int) -> str:
    """The rows of a session for `rows_to_traces`, from a store of this schema.

    Unordered: SQLite would copy every blob to sort the rows, and the caller need not.
    """
    base, digest = ("base", "digest") if schema > 1 else ("NULL", "NULL")
    return f"SELECT seq, {base}, {', '.join(TRACE_COLUMNS[:-1])}, {digest} FROM traces WHERE session = {SESSION}"


def select_trace(schema: int) -> str:
    """Likewise the row of one trace of a session, and those without which it cannot be read."""
    if schema < 2:
        return f"{select_traces(schema)} AND id = ?"
    columns = ("seq", "base", *TRACE_COLUMNS)
    # Whole rows, so that none is looked for twice, with a plan that follows from a guess at how many there are.
    return (
        f"WITH RECURSIVE wanted AS (SELECT {', '.join(columns)} FROM traces WHERE session = {SESSION} AND id = ? "
        f"UNION ALL SELECT {', '.join(f'traces.{name}' for name in columns)} "
        "FROM wanted JOIN traces ON traces.seq = wanted.base) "
        "SELECT * FROM wanted"
    )


SELECT_LAST_CALL = f"SELECT MAX(started_at) FROM traces WHERE session = {SESSION}"

SELECT_SESSION_OF = "SELECT id FROM sessions WHERE seq = (SELECT session FROM traces WHERE id = ? LIMIT 1)"
"""Reads through the index of (session, id), about 50 ms for a million traces: only people ask, and an index for it would make
every write dearer."""


def select_credits(schema: int) -> str:
    """The rows of a session for `row_to_credit` in the order of its calls, from a store of this schema."""
    columns = [f"credits.{name}" if name != "trajectory_index" or schema > 2 else "0" for name in CREDIT_COLUMNS]
    return (
        f"SELECT {', '.join(columns)} FROM credits "
        "LEFT JOIN traces ON traces.session = credits.session AND traces.id = credits.trace_id "
        f"WHERE credits.session = {SESSION} ORDER BY traces.seq IS NULL, traces.seq, 2, 3"
    )


SELECT_SESSIONS = (
    "SELECT id, created_at, (SELECT COUNT(*) FROM traces WHERE session = sessions.seq), metadata, seq FROM sessions"
)


def trace_to_row(packed: PackedTrace) -> Row:
    """The session's id, and the values of `TRACE_COLUMNS`."""
    *head, error = packed.draft.head
    return (
        *head,
        error and plain_text(error),
        packed.prompt_ids,
        packed.response_ids,
        packed.draft.logprobs,
        packed.document,
        packed.digest,
    )


def rows_to_traces(found: Iterable[Sequence[Any]], session_id: str) -> list[tuple[int, int | None, Trace]]:
    """The rows of `select_traces` in call order: `seq`, the base's `seq`, and the trace.

    Traces of one conversation share the message objects that they have in common.

    Raises:
        LookupError: if a trace was left out without which another cannot be read.
        ValueError: naming the trace that cannot be read.
    """
    traces: dict[int, Trace] = {}
    bases: dict[int, int | None] = {}
    num_bytes = 0
    for row in sorted(found, key=itemgetter(0)):
        seq, base = row[:2]
        traces[seq], size = _row_to_trace(row[2:], session_id, None if base is None else traces.get(base))
        bases[seq] = base
        num_bytes += size
        if num_bytes > _MAX_BYTES:
            raise TooLargeError(
                f"call {traces[seq].id!r} is the first beyond {_MAX_BYTES:,} bytes of the session, unpacked"
            )
    return [(seq, bases[seq], trace) for seq, trace in traces.items()]


def _row_to_trace(row: Sequence[Any], session_id: str, base: Trace | None) -> tuple[Trace, int]:
    """Return the trace, and about how many bytes it takes beside those that it builds upon."""
    values = dict(zip(TRACE_COLUMNS, row, strict=True))
    del values["digest"]
    try:
        document, shared_ids, size = unpack_document_of(values.pop("document"), base)
        for name, unpack in (("prompt_ids", unpack_ids), ("response_ids", unpack_ids), ("logprobs", unpack_floats)):
            values[name] = unpack(values[name])
        if shared_ids:
            values["prompt_ids"] = shared_ids + values["prompt_ids"]
        trace = Trace(session_id=session_id, **values, **document)
        return trace, size + 8 * (len(trace.prompt_ids) + len(trace.response_ids) + len(trace.messages))
    except LookupError:
        raise
    except UNREADABLE as error:
        raise ValueError(f"call {values['id']!r} is unreadable: {error}") from error


def rows_to_rewrite(found: Iterable[Sequence[Any]], session_id: str, seq: int) -> list[Row]:
    """Of the rows of a session those that build upon the row `seq`, standing alone, as `UPDATE_TRACE` wants them."""
    return [
        (*trace_to_row(pack(draft_of(trace)))[1:], child)
        for child, base, trace in rows_to_traces(found, session_id)
        if base == seq
    ]


def credit_to_row(credit: StepCredit) -> Row:
    """The session's id, and the values of `CREDIT_COLUMNS`."""
    return (
        credit.session_id,
        credit.trace_id,
        credit.training_step,
        credit.trajectory_index,
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
    """The credit of one row of `select_credits`."""
    values = dict(zip(CREDIT_COLUMNS, row, strict=True))
    if values["trainer_logprobs"] is not None:
        values["trainer_logprobs"] = unpack_floats(values["trainer_logprobs"])
    return StepCredit(session_id=session_id, **values)


def row_to_session(row: Sequence[Any]) -> SessionInfo:
    """The session of one row of `SELECT_SESSIONS`."""
    session_id, created_at, num_traces, metadata, seq = row
    return SessionInfo(
        id=session_id,
        created_at=created_at,
        num_traces=num_traces,
        metadata=unpack_document(metadata) if metadata is not None else {},
        number=seq,
    )


def _number(value: Any) -> float | None:
    """A plain float of whatever number a trainer computed; SQLite takes no scalars of numpy."""
    return None if value is None else float(value)
