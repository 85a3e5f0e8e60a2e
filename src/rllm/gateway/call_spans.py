"""A span of OpenTelemetry for each call that left a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm import telemetry

if TYPE_CHECKING:
    from rllm.gateway.observed import ObservedCall


def record_span(observed: ObservedCall) -> None:
    """Make the call's span, as a part of what its W3C headers name, or else of what its session was opened in."""
    call, traces = observed.call, observed.traces
    if call is None or not traces:
        return
    error_type = str(observed.status) if observed.status >= 400 else None
    broken = next((trace.finish_reason for trace in traces if trace.finish_reason in ("abort", "error")), None)
    telemetry.record_call(
        traces,
        operation="text_completion" if observed.dialect == "completions" else "chat",
        error_type=error_type or broken,
        headers=call.trace_context or call.session.trace_context,
        attributes={"rllm.dialect": observed.dialect, "rllm.stream": observed.mode == "stream"},
    )
