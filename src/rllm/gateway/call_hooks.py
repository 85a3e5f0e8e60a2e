"""Hooks that run after each call: a line of JSON in the log, and an OpenTelemetry span.

Both have ids, counts and times, and never texts or keys. The configuration enables them; each loads its packages only
then.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

import orjson

from rllm.gateway.config import GatewayConfig
from rllm.gateway.model_call import ModelCall
from rllm.store.codec import plain_text
from rllm.types import JSONObject, Trace

logger = logging.getLogger(__name__)

_FIELDS = "rllm_fields"
"""Attribute of a log record that holds its structured fields."""
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFinished:
    """One finished request for an answer of the model."""

    dialect: str
    """Name of its wire format."""
    mode: str
    """`json`, `stream` or `count`."""
    status: int
    seconds: float
    call: ModelCall | None
    """`None` for a request that was refused before its content was read, for its key or its rate."""
    headers: Mapping[bytes, bytes]

    @property
    def session_id(self) -> str | None:
        return self.call.session.id if self.call is not None else None

    @property
    def traces(self) -> list[Trace]:
        """Traces of its choices, or of its failure; none for a retry, nor for a refused key or rate."""
        return self.call.traces if self.call is not None else []


CallHook: TypeAlias = Callable[[CallFinished], None]


def hooks_of(config: GatewayConfig) -> tuple[CallHook, ...]:
    """Return the hooks that the configuration enables.

    Raises:
        MissingDependencyError: if one needs a package that is not installed.
    """
    hooks: list[CallHook] = [log_call] if config.log_calls else []
    if config.otel:
        from rllm import telemetry

        telemetry.enable(response_ids=config.otel_response_ids)
        hooks.append(record_span)
    return tuple(hooks)


def record_span(finished: CallFinished) -> None:
    """Record the call as a span, whose parent is that of the call's W3C headers, or else of its session."""
    from rllm import telemetry

    call, traces = finished.call, finished.traces
    if call is None or not traces:
        return
    error_type = str(finished.status) if finished.status >= 400 else None
    broken = next((trace.finish_reason for trace in traces if trace.finish_reason in ("abort", "error")), None)
    telemetry.record_call(
        traces,
        operation="text_completion" if finished.dialect == "completions" else "chat",
        error_type=error_type or broken,
        headers=call.trace_context or call.session.trace_context,
        attributes={"rllm.dialect": finished.dialect, "rllm.stream": finished.mode == "stream"},
    )


def log_call(finished: CallFinished) -> None:
    """Log one call, at level INFO, or WARNING if it failed."""
    traces = finished.traces
    failed = finished.status >= 400 or any(trace.finish_reason in ("abort", "error") for trace in traces)
    w3c_trace = _TRACEPARENT.fullmatch(finished.headers.get(b"traceparent", b""))
    fields = {
        "session_id": finished.session_id,
        "trace_ids": [trace.id for trace in traces],
        "parent_id": traces[0].parent_id if traces else None,
        "w3c_trace_id": w3c_trace[1].decode() if w3c_trace else None,
        "dialect": finished.dialect,
        "mode": finished.mode,
        "status": finished.status,
        "seconds": round(finished.seconds, 6),
        "finish_reasons": [trace.finish_reason for trace in traces],
        "num_prompt_ids": len(traces[0].prompt_ids) if traces else None,
        "num_response_ids": sum(len(trace.response_ids) for trace in traces) if traces else None,
        "usable": all(trace.error is None for trace in traces) if traces else None,
        "weight_version": traces[0].weight_version if traces else None,
    }
    logger.log(logging.WARNING if failed else logging.INFO, "call", extra={_FIELDS: fields})


def log_as_json() -> None:
    """Write all log records of this process to stderr as lines of JSON, including one for each call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logger.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """Formatter of records as lines of JSON: `time` (UTC), `level`, `logger`, `message`, and their own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: JSONObject = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain_text(record.getMessage()),
        }
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        line.update((name, value) for name, value in fields.items() if value is not None)
        if record.exc_info:
            line["exception"] = plain_text(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()
