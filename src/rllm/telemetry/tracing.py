"""Implementation of spans; the only module that imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import default_getter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rllm.telemetry import Span
from rllm.types import DRIFT_KEY, JSONMapping, JSONObject, Trace

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
"""Sampling parameters, by their names in the conventions. Stop strings are omitted, since they are content."""


class OpenSpan(Span):
    """A started span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @contextmanager
    def active(self) -> Iterator[None]:
        with trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield

    def note(self, attributes: JSONMapping) -> None:
        self._span.set_attributes(_without_none(attributes))

    def end(self, error: BaseException | str | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            kind = error if isinstance(error, str) else type(error).__name__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class Tracing:
    """Tracer of this process."""

    def __init__(self) -> None:
        self.response_ids = False
        self._own: TracerProvider | None = None
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # the placeholder until one is set
            resource = Resource.create()
            if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # no name is configured
                resource = resource.merge(Resource({SERVICE_NAME: "rllm"}))
            provider = self._own = TracerProvider(resource=resource)
            self._own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("rllm")

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()

    def start(self, name: str, attributes: JSONMapping) -> OpenSpan:
        """Start a span as a child of the current one."""
        return OpenSpan(self._tracer.start_span(_text(name), attributes=_without_none(attributes)))

    @contextmanager
    def started(self, name: str, attributes: JSONMapping) -> Iterator[OpenSpan]:
        """Wrap the block in a span, unless the span is ended inside with an error that does not propagate."""
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
        attributes: JSONMapping,
    ) -> None:
        first = traces[0]
        span = self._tracer.start_span(
            _text(f"{attributes['gen_ai.operation.name']} {first.model}".rstrip()),
            context=_W3C.extract(headers, getter=default_getter) if headers else None,
            kind=trace.SpanKind.CLIENT,
            start_time=round(first.started_at * 1e9),
            attributes=_without_none({**attributes, **_facts(traces)}),
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


def _facts(traces: Sequence[Trace]) -> JSONObject:
    """Return attributes of a call from its traces, without content."""
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


def _number(value: object) -> float | None:
    """Return a number that OTLP can carry, else `None`.

    An agent may request anything, and one invalid value would lose all spans of the same export.
    """
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _without_none(attributes: JSONMapping) -> JSONObject:
    return {name: _encodable(value) for name, value in attributes.items() if value is not None}


def _encodable(value: object) -> object:
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Return text that OTLP can carry; a lone surrogate in a name would lose all spans of the same export."""
    return text.encode("utf-8", "backslashreplace").decode()
