"""One line of log for each call, and logs as lines of JSON: ids, counts and times, never what was said, and no key."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from rllm.store.codec import plain_text

if TYPE_CHECKING:
    from rllm.gateway.observed import ObservedCall

logger = logging.getLogger(__name__)

_FIELDS = "rllm_fields"
"""Where a log record keeps its structured fields."""
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def log_call(observed: ObservedCall) -> None:
    """Tell of one call, at level INFO, or WARNING where it failed."""
    traces = observed.traces
    failed = observed.status >= 400 or any(trace.finish_reason in ("abort", "error") for trace in traces)
    fields = {
        "session_id": observed.session_id,
        "trace_ids": [trace.id for trace in traces],
        "parent_id": traces[0].parent_id if traces else None,
        "w3c_trace_id": _w3c_trace_id(observed.headers),
        "dialect": observed.dialect,
        "mode": observed.mode,
        "status": observed.status,
        "seconds": round(observed.seconds, 6),
        "finish_reasons": [trace.finish_reason for trace in traces],
        "num_prompt_ids": len(traces[0].prompt_ids) if traces else None,
        "num_response_ids": sum(len(trace.response_ids) for trace in traces) if traces else None,
        "usable": all(trace.error is None for trace in traces) if traces else None,
        "weight_version": traces[0].weight_version if traces else None,
    }
    logger.log(logging.WARNING if failed else logging.INFO, "call", extra={_FIELDS: fields})


def log_as_json() -> None:
    """Write all that this process logs to stderr, a JSON object a line, with a line for each call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logger.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: `time` (UTC), `level`, `logger`, `message`, and the fields of the record, if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain_text(record.getMessage()),
        }
        fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
        line.update((name, value) for name, value in fields.items() if value is not None)
        if record.exc_info:
            line["exception"] = plain_text(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()


def _w3c_trace_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The trace that a framework which traces says the call is a part of."""
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    return found[1].decode() if found else None
