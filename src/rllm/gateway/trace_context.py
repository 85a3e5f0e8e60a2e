"""The W3C trace context of a request: of which larger piece of work its call is a part, for spans and for the upstream."""

from __future__ import annotations

from collections.abc import Mapping

_HEADERS = ("traceparent", "tracestate")


def trace_context_of(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Its headers, as they came; mostly none."""
    return {name: headers[name.encode()].decode("latin-1") for name in _HEADERS if name.encode() in headers}
