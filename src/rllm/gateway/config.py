"""Gateway settings."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from rllm._runtime.network import is_loopback
from rllm.errors import ConfigError
from rllm.types import Trace

SESSION_MEMORY_GB = 0.5

_ABOVE_ZERO = (
    "session_memory_gb",
    "max_body_bytes",
    "body_timeout_s",
    "max_header_bytes",
    "max_headers",
    "header_timeout_s",
    "unread_timeout_s",
    "keep_alive_s",
    "ready_timeout_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Where the gateway listens, who may use it, and what it accepts."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    api_key: str | None = None
    """What clients must present as `Authorization: Bearer KEY` (or `KEY:rllm-SESSION`); needed on any but a loopback host."""
    admin_key: str | None = None
    """What an operator must present to change the upstreams; the API key, where there is no other. Agents never need it."""
    session_ids_admit: bool = False
    """Whether a call may present the random id of a session that was begun before, in place of a key: for gateways of
    runs, whose agents are given a base URL, and may have clients with keys of their own. Ids that someone chose do not
    admit, since they can be guessed."""
    require_tokens: bool = False
    """Answer 502 when the upstream gives an answer without ids and log-probabilities, instead of only recording so."""
    exact_turns: bool = True
    """Whether a later turn's prompt is made of the tokens that were sampled before, where the upstream can do so; else it is
    the template's own rendering of the messages, which may write answers otherwise or leave out their reasoning."""
    session_memory_gb: float = SESSION_MEMORY_GB
    """10^9 bytes that may be kept in memory of the sessions that went on last, one at least; the others are read from the store
    when they go on. Those with calls under way come on top."""
    max_body_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 120.0
    """How long the body of a request may take to arrive."""
    max_header_bytes: int = 64 * 1024
    """Names and values of a request's headers together."""
    max_headers: int = 200
    header_timeout_s: float = 30.0
    """How long the headers of a request may take to arrive."""
    unread_timeout_s: float = 300.0
    """How long a client may leave so much of its answer unread that nothing more can be sent; then it counts as gone."""
    redact: Callable[[Trace], Trace] | None = None
    """Changes the texts of each trace before it is stored; see `rllm.gateway.redaction`."""
    keep_alive_s: float = 15.0
    """After how long a silence of a streamed answer something is sent that clients ignore, so that they go on waiting."""
    ready_timeout_s: float = 5.0
    """How long `/readyz` waits for the upstream and for the store."""
    shutdown_timeout_s: float = 10.0
    """How long calls in flight may go on once the gateway is told to stop."""
    log_calls: bool = False
    """Whether each call is logged, by its ids, counts and times."""
    otel: bool = False
    """Whether this process makes OpenTelemetry spans, of calls, agents and tools, and exports them to
    OTEL_EXPORTER_OTLP_ENDPOINT; see `rllm.telemetry`."""
    otel_response_ids: bool = False
    """Whether spans of calls hold the sampled ids, beside their number."""

    @classmethod
    def of_run(cls, api_key: str, **settings: Any) -> Self:
        """Return the settings of a gateway that a run starts for its own agents.

        It needs a key, as on any host. Agents get none of it: the random ids of their sessions are their keys.
        """
        return cls(api_key=api_key, admin_key=secrets.token_urlsafe(32), session_ids_admit=True, **settings)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway port={self.port}: use 1 to 65535, or 0 for any free port")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"gateway host={self.host!r} can be reached from other machines: set an API key (--api-key KEY), "
                "or listen on 127.0.0.1"
            )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"gateway {name}={value!r}: use a number above 0")
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not (key.isascii() and key.isprintable() and key):
                raise ConfigError(f"gateway {name}: use one or more printable ASCII characters")
