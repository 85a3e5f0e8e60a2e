"""Gateway settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, Self

from rllm.errors import ConfigError

SESSION_MEMORY_GB = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Gateway settings: address, keys and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; a key is required unless it is a loopback address."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must present, as `Authorization: Bearer KEY` or `KEY:rllm-SESSION`."""
    session_ids_admit: bool = False
    """Accept the random id of an existing session in place of a key: for gateways of runs, whose agents get a base URL
    and may use clients with keys of their own. Chosen ids are not accepted, since they can be guessed."""
    require_tokens: bool = False
    """Answer 502 if the upstream's answer lacks ids or log-probabilities, instead of only recording the reason."""
    exact_turns: bool = True
    """Build a later turn's prompt from the tokens that were sampled before, if the upstream can; otherwise the
    template renders all messages again, which may write answers differently or leave out their reasoning."""
    session_memory_gb: float = SESSION_MEMORY_GB
    """Memory for the most recently used sessions, in 10^9 bytes; others are read from the store when they continue.
    Sessions with calls in progress are not counted."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Maximum size of a request's body."""
    body_timeout_s: float = 120.0
    """Seconds for the body of a request to arrive."""
    max_header_bytes: int = 64 * 1024
    """Maximum size of a request's headers, names and values together."""
    max_headers: int = 200
    """Maximum number of a request's headers."""
    header_timeout_s: float = 30.0
    """Seconds for the headers of a request to arrive."""
    unread_timeout_s: float = 300.0
    """Seconds for which a client may leave its answer unread, with all buffers full, before it is disconnected."""
    keep_alive_s: float = 15.0
    """Seconds of silence in a streamed answer before a comment is sent, so that clients continue to wait."""
    ready_timeout_s: float = 5.0
    """Seconds for which `/readyz` waits for the upstream and for the store."""
    shutdown_timeout_s: float = 10.0
    """Seconds that calls in progress may take once the gateway stops."""
    otel: bool = False
    """Export OpenTelemetry spans of calls, agents and tools to OTEL_EXPORTER_OTLP_ENDPOINT; see `rllm.telemetry`."""
    otel_response_ids: bool = False
    """Put the sampled ids into spans of calls, in addition to their number."""

    @classmethod
    def of_run(cls, api_key: str, **settings: Any) -> Self:
        """Return the settings of a gateway that a run starts for its own agents.

        It has a key on every host. Agents never see it: the random ids of their sessions admit them instead.
        """
        return cls(api_key=api_key, session_ids_admit=True, **settings)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port={self.port}: use 1 to 65535, or 0 for any free port")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"gateway.host={self.host!r} can be reached from other machines: set an API key (--api-key KEY), "
                "or listen on 127.0.0.1"
            )
        _check_above_zero(self, "gateway.", but=("port", "shutdown_timeout_s"))
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key):
            raise ConfigError("gateway.api_key (RLLM_GATEWAY_API_KEY): use one or more printable ASCII characters")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Limits of a pool of inference servers."""

    hold_timeout_s: float = 60.0
    """Seconds for which a call waits while no replica answers. During a pause, only the total time counts."""
    total_timeout_s: float = 3600.0
    """Seconds that a call may take in all, waiting and retries included."""
    check_interval_s: float = 10.0
    """Longest pause between two checks of a replica that is down."""

    def __post_init__(self) -> None:
        _check_above_zero(self)


def _check_above_zero(config: GatewayConfig | PoolConfig, prefix: str = "", *, but: Container[str] = ()) -> None:
    for name in (item.name for item in fields(config) if item.type in ("int", "float") and item.name not in but):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{prefix}{name}={getattr(config, name)!r}: use a number above 0")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
