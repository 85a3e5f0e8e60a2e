"""The way of one call through the upstreams: what is asked of it, and what its trace is told about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

UPSTREAM_KEY = "rllm.upstream"
"""Where the metadata of a trace keeps the way of its call: `{"replica", "retries", "updated_to"}`, as far as there is any."""

_NO_TIMES: Mapping[str, float] = MappingProxyType({})
_NO_NOTES: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Route:
    """Made for each call, and filled in on the way."""

    session_id: str | None = None
    """Calls of one session share the beginnings of their prompts, which the replica that has seen one still knows; `None`
    for a call that nothing continues."""
    deadline: float | None = None
    """When the call must be over, on `time.monotonic`'s clock, waiting and retries included; `None` until a pool sets it."""
    replica: str | None = None
    """The address that answered, where there are several."""
    weight_version: int | None = None
    """The weights that the replica had when the call reached it, where its operator said so."""
    updated_to: int | None = None
    """The weights that it had when the call ended, if they are others."""
    queue_s: float = 0.0
    """How long the call was held in all."""
    retries: list[dict[str, Any]] = field(default_factory=list)
    """Attempts that gave no answer: `{"replica", "status", "error", "lost_s"}` each."""
    ignored: str = ""
    """Fields of the request that have no effect there, as another gateway names them in its header."""

    def timings(self) -> Mapping[str, float]:
        """What to add to the trace's timings."""
        if not self.queue_s and not self.retries:
            return _NO_TIMES
        return {"queue_s": self.queue_s, "retry_s": sum(retry["lost_s"] for retry in self.retries)}

    def notes(self) -> Mapping[str, Any]:
        """What to add to the trace's metadata."""
        if self.replica is None and not self.retries and self.updated_to is None:
            return _NO_NOTES
        told = {"replica": self.replica, "retries": self.retries or None, "updated_to": self.updated_to}
        return {UPSTREAM_KEY: {name: value for name, value in told.items() if value is not None}}
