"""The spans themselves: the one module that imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import default_getter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rllm.types import DRIFT_KEY, Trace

_W3C = TraceContextTextMapPropagator()

_REQUEST_FIELDS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "n": "gen_ai.request.choice.count",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
"""Sampling parameters as the conventions call them. Stop strings are left out: they are content."""


class OpenSpan:
    """A span that has begun; implements `rllm.telemetry.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @contextmanager
    def active(self) -> Iterator[None]:
        with trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield

    def note(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(_given(attributes))

    def end(self, error: BaseException | str | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            kind = error if isinstance(error, str) else type(error).__name__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class Tracing:
    """Where the spans of this process go."""

    def __init__(self) -> None:
        self.response_ids = False
        self._own: TracerProvider | None = None
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # what stands there until somebody sets another
            provider = self._own = _exporting_provider()
        self._tracer = provider.get_tracer("rllm")

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()

    def start(self, name: str, attributes: Mapping[str, Any]) -> OpenSpan:
        """A span as a part of what is going on here."""
        return OpenSpan(self._tracer.start_span(_text(name), attributes=_given(attributes)))

    @contextmanager
    def started(self, name: str, attributes: Mapping[str, Any]) -> Iterator[OpenSpan]:
        """A span of what is done inside, unless it ends there already, with an error that does not travel."""
        span = self.start(name, attributes)
        try:
            with span.active():
                yield span
        except BaseException as error:
            span.end(error)
            raise
        span.end()

    def record_call(
        self,
        traces: Sequence[Trace],
        *,
        error_type: str | None,
        headers: Mapping[str, str] | None,
        attributes: Mapping[str, Any],
    ) -> None:
        first = traces[0]
        span = self._tracer.start_span(
            _text(f"{attributes['gen_ai.operation.name']} {first.model}".rstrip()),
            context=_W3C.extract(headers, getter=default_getter) if headers else None,
            kind=trace.SpanKind.CLIENT,
            start_time=round(first.started_at * 1e9),
            attributes=_given({**attributes, **_facts(traces)}),
        )
        if self.response_ids:
            for item in traces:
                suffix = f".{item.choice_index}" if item.choice_index else ""
                span.set_attribute(f"rllm.response_ids{suffix}", item.response_ids)
        if error_type is not None:
            span.set_attribute("error.type", error_type)
            span.set_status(trace.StatusCode.ERROR)
        span.end(round((first.started_at + first.timings.get("total_s", 0.0)) * 1e9))

    def outgoing_headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        _W3C.inject(headers)
        return headers


def _exporting_provider() -> TracerProvider:
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # nobody named it
        resource = resource.merge(Resource({SERVICE_NAME: "rllm"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _facts(traces: Sequence[Trace]) -> dict[str, Any]:
    """What the traces of one call say about it, content left out."""
    first = traces[0]
    num_sampled = sum(len(item.response_ids) for item in traces)
    return {
        "gen_ai.conversation.id": first.session_id,
        "gen_ai.request.model": first.model or None,
        "gen_ai.response.model": first.model or None,
        "gen_ai.response.id": first.call_id,
        "gen_ai.response.finish_reasons": [item.finish_reason for item in traces if item.finish_reason],
        "gen_ai.usage.input_tokens": len(first.prompt_ids) or None,
        "gen_ai.usage.output_tokens": num_sampled or None,
        **{
            name: _number(first.sampling.get(field))
            for field, name in _REQUEST_FIELDS.items()
            if field in first.sampling
        },
        "rllm.session_id": first.session_id,
        "rllm.trace_ids": [item.id for item in traces],
        "rllm.parent_id": first.parent_id,
        "rllm.prompt_ids.length": len(first.prompt_ids),
        "rllm.response_ids.length": num_sampled,
        "rllm.usable": all(item.error is None for item in traces),
        "rllm.weight_version": first.weight_version,
        "rllm.logprobs_kind": first.logprobs_kind,
        "rllm.template_hash": first.template_hash,
        "rllm.drift": first.metadata.get(DRIFT_KEY),
        "rllm.first_token_s": first.timings.get("first_token_s"),
    }


def _number(value: Any) -> float | None:
    """An agent may ask for anything; one value that OTLP cannot carry would cost the spans that are exported with it."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _carried(value) for name, value in attributes.items() if value is not None}


def _carried(value: Any) -> Any:
    if isinstance(value, list):
        return [_carried(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Text that OTLP can carry: a span whose name has half of a surrogate pair would cost all that are exported with it."""
    return text.encode("utf-8", "backslashreplace").decode()
