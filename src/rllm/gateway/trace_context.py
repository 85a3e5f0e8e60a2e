"""The W3C trace context of a request: of which larger piece of work its call is a part, for spans and for the upstream."""

from __future__ import annotations

from collections.abc import Mapping

_HEADERS = ((b"traceparent", "traceparent"), (b"tracestate", "tracestate"))


def trace_context_of(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Its headers, as they came; mostly none."""
    return {name: headers[header].decode("latin-1") for header, name in _HEADERS if header in headers}
