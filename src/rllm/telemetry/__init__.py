"""OpenTelemetry spans of agents, tools and model calls: nothing, not even an import, until `enable` is called.

    rllm.telemetry.enable()   # exports to OTEL_EXPORTER_OTLP_ENDPOINT, over HTTP

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI, and `rllm.*` for what these lack.
What was said is never in a span: no messages, arguments, results or error messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rllm.errors import MissingDependencyError
from rllm.types import Trace

if TYPE_CHECKING:
    from rllm.telemetry.tracing import Tracing

__all__ = ["Span", "agent_span", "disable", "enable", "outgoing_headers", "record_call", "rollout_span", "tool_span"]

_tracing: Tracing | None = None


class Span(Protocol):
    """A stretch of work; one that telemetry ignores, while it is off, has the same methods."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, other spans become parts of this one. May be entered more than once, in any thread."""
        ...

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Add to its attributes; those that are `None` are left out."""
        ...

    def end(self, error: BaseException | str | None = None) -> None:
        """It is over, well or with this error, of which only the type is told. What is said of it later is ignored."""
        ...


class _NoSpan:
    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def note(self, attributes: Mapping[str, Any]) -> None:
        return None

    def end(self, error: BaseException | str | None = None) -> None:
        return None


_NO_SPAN = _NoSpan()


def enable(*, response_ids: bool = False) -> None:
    """From here on, this process makes spans. Where it has a tracer provider already they go there, else to an OTLP
    exporter over HTTP, which the standard environment variables configure. Repeatable.

    Args:
        response_ids: whether spans of model calls hold the sampled ids, as `rllm.response_ids`, beside their number.

    Raises:
        MissingDependencyError: if OpenTelemetry is not installed.
    """
    global _tracing
    try:
        from rllm.telemetry.tracing import Tracing
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("opentelemetry-sdk", "otel", "tracing with OpenTelemetry") from error
    if _tracing is None:
        _tracing = Tracing()
    _tracing.response_ids = _tracing.response_ids or response_ids


def disable() -> None:
    """Export what is left, and make no more spans. Repeatable."""
    global _tracing
    if _tracing is not None:
        _tracing.close()
        _tracing = None


def agent_span(name: str) -> Span:
    """What one function does as an agent; its maker ends it."""
    if _tracing is None:
        return _NO_SPAN
    return _tracing.start(f"invoke_agent {name}", {**_operation("invoke_agent"), "gen_ai.agent.name": name})


@contextmanager
def rollout_span(attributes: Mapping[str, Any]) -> Iterator[Span]:
    """One try at one task."""
    if _tracing is None:
        yield _NO_SPAN
        return
    with _tracing.started("invoke_agent rollout", {**_operation("invoke_agent"), **attributes}) as span:
        yield span


@contextmanager
def tool_span(name: str) -> Iterator[Span]:
    """One call of a tool."""
    if _tracing is None:
        yield _NO_SPAN
        return
    attributes = {**_operation("execute_tool"), "gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
    with _tracing.started(f"execute_tool {name}", attributes) as span:
        yield span


def record_call(
    traces: Sequence[Trace],
    *,
    operation: str = "chat",
    error_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Make the span of a model call that is over.

    Args:
        traces: of its choices, one at least.
        operation: `chat` or `text_completion`.
        error_type: why there is no whole answer: an HTTP status, or the name of an exception.
        headers: those of the request, whose W3C trace context says what the call is a part of; without any, the call is a
            part of whatever is going on here.
        attributes: more of them.
    """
    if _tracing is not None:
        more = {**_operation(operation), **(attributes or {})}
        _tracing.record_call(traces, error_type=error_type, headers=headers, attributes=more)


def outgoing_headers() -> dict[str, str]:
    """The W3C trace context of what is going on here, for a request that is a part of it; empty while telemetry is off."""
    return {} if _tracing is None else _tracing.outgoing_headers()


def _operation(name: str) -> dict[str, Any]:
    return {"gen_ai.operation.name": name, "gen_ai.provider.name": "rllm"}
