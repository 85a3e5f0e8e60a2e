"""A real OTLP collector on loopback, to which the spans of the test go."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rllm import telemetry


@dataclass(frozen=True)
class Spanned:
    """A span as the collector received it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    attributes: dict[str, Any]
    service: str
    seconds: float


@dataclass
class Collected:
    """Spans are complete once telemetry is disabled: `spans()` disables it."""

    requests: list[bytes]

    def spans(self) -> list[Spanned]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        telemetry.disable()
        exported = [ExportTraceServiceRequest.FromString(body) for body in self.requests]
        return [spanned for request in exported for spanned in _spans_of(request)]

    def named(self, name: str) -> Spanned:
        [span] = [span for span in self.spans() if span.name == name]
        return span


def _spans_of(request):
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    for resource in request.resource_spans:
        service = _plain(resource.resource.attributes)["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield Spanned(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                status=Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
                attributes=_plain(span.attributes),
                service=service,
                seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            )


def _plain(attributes):
    return {item.key: _value(item.value) for item in attributes}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting(monkeypatch):
    """Collect the spans that this process exports once telemetry is enabled; disable it afterwards."""
    requests: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            requests.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        yield Collected(requests)
    finally:
        telemetry.disable()
        server.shutdown()
        server.server_close()
        thread.join()
