"""The session in a request's W3C baggage, which frameworks that trace carry along by themselves, across processes.

https://www.w3.org/TR/baggage/
"""

from __future__ import annotations

from urllib.parse import unquote

SESSION_KEY = "rllm.session"
_MAX_CHARS = 8192
"""What the recommendation has everybody pass on; of more, an intermediary may have cut some."""


def session_of_baggage(baggage: str) -> str | None:
    """The value of the first member `rllm.session=ID` of a `baggage` header, percent-decoded; its properties are ignored."""
    if SESSION_KEY not in baggage:
        return None
    for member in baggage[:_MAX_CHARS].split(","):
        key, _, value = member.partition(";")[0].partition("=")
        if key.strip() == SESSION_KEY:
            return unquote(value.strip()) or None
    return None
