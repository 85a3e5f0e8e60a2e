"""OpenTelemetry spans of agents, tools and model calls. Before a call of `enable`, nothing is imported or recorded.

    rllm.telemetry.enable()   # exports to OTEL_EXPORTER_OTLP_ENDPOINT, over HTTP

`tracing` is the only module that imports OpenTelemetry.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI, with `rllm.*` for additions. Spans
never have content: no messages, arguments, results or error messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from rllm.errors import needed
from rllm.types import JSONMapping, Trace

if TYPE_CHECKING:
    from rllm.telemetry.tracing import Tracing

__all__ = ["Span", "agent_span", "disable", "enable", "outgoing_headers", "record_call", "rollout_span", "tool_span"]

_tracing: Tracing | None = None


class Span:
    """A span of work. An object of this class itself, made while telemetry is off, does nothing."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this span the parent of spans that start in the block. May be entered more than once, in any thread."""
        yield

    def note(self, attributes: JSONMapping) -> None:
        """Add attributes, except those that are `None`."""

    def end(self, error: BaseException | str | None = None) -> None:
        """End the span, optionally with an error (only its type is recorded). Later calls are no-ops."""


_NO_SPAN = Span()


def enable(*, response_ids: bool = False) -> None:
    """Make spans in this process from now on. Repeatable.

    They go to the process's tracer provider if it has one, otherwise to an OTLP exporter over HTTP, which the standard
    environment variables configure.

    Args:
        response_ids: include the sampled ids in spans of model calls, as `rllm.response_ids`, with their number.

    Raises:
        MissingDependencyError: if OpenTelemetry is not installed.
    """
    global _tracing
    with needed("opentelemetry-sdk", "otel", "tracing with OpenTelemetry"):
        from rllm.telemetry.tracing import Tracing
    if _tracing is None:
        _tracing = Tracing()
    _tracing.response_ids = _tracing.response_ids or response_ids


def disable() -> None:
    """Export pending spans, and stop making spans. May be called more than once."""
    global _tracing
    if _tracing is not None:
        _tracing.close()
        _tracing = None


def agent_span(name: str) -> Span:
    """Start the span of an agent function; the caller ends it."""
    if _tracing is None:
        return _NO_SPAN
    return _tracing.start(f"invoke_agent {name}", {**_operation("invoke_agent"), "gen_ai.agent.name": name})


def rollout_span(attributes: JSONMapping) -> AbstractContextManager[Span]:
    """Wrap one rollout in a span."""
    return _span("invoke_agent rollout", {**_operation("invoke_agent"), **attributes})


def tool_span(name: str) -> AbstractContextManager[Span]:
    """Wrap one tool call in a span."""
    attributes = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
    return _span(f"execute_tool {name}", {**_operation("execute_tool"), **attributes})


def _span(name: str, attributes: JSONMapping) -> AbstractContextManager[Span]:
    return nullcontext(_NO_SPAN) if _tracing is None else _tracing.started(name, attributes)


def record_call(
    traces: Sequence[Trace],
    *,
    operation: str = "chat",
    error_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    attributes: JSONMapping | None = None,
) -> None:
    """Record the span of a finished model call.

    Args:
        traces: the traces of its choices, at least one.
        operation: `chat` or `text_completion`.
        error_type: reason for an incomplete answer: an HTTP status, or the name of an exception.
        headers: headers of the request, whose W3C trace context names the parent span; the current span by default.
        attributes: further attributes.
    """
    if _tracing is not None:
        more = {**_operation(operation), **(attributes or {})}
        _tracing.record_call(traces, error_type=error_type, headers=headers, attributes=more)


def outgoing_headers() -> dict[str, str]:
    """Return the W3C trace context of the current span, for a request in it; empty while telemetry is off."""
    return {} if _tracing is None else _tracing.outgoing_headers()


def _operation(name: str) -> dict[str, str]:
    return {"gen_ai.operation.name": name, "gen_ai.provider.name": "rllm"}
