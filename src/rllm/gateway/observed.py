"""Who else hears of a call that is over: the log, and OpenTelemetry, where the configuration wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rllm.gateway.config import GatewayConfig
from rllm.gateway.model_call import ModelCall
from rllm.types import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCall:
    """One request for an answer of the model, and what came of it."""

    dialect: str
    """`chat`, `completions`, `responses` or `messages`."""
    mode: str
    """`json`, `stream` or `count`."""
    status: int
    seconds: float
    call: ModelCall | None
    """`None` for a request that was refused for who asks, or how often."""
    headers: Mapping[bytes, bytes]

    @property
    def session_id(self) -> str | None:
        return self.call.session.id if self.call is not None else None

    @property
    def traces(self) -> list[Trace]:
        """Those of its choices, or of its failure; none for a retry, and where who asks, or how often, was refused."""
        return self.call.traces if self.call is not None else []


CallObserver: TypeAlias = Callable[[ObservedCall], None]


def observers_of(config: GatewayConfig) -> tuple[CallObserver, ...]:
    """Those that the configuration asks for; each loads only then.

    Raises:
        MissingDependencyError: if one needs a package that is not installed.
    """
    observers: list[CallObserver] = []
    if config.log_calls:
        from rllm.gateway.call_log import log_call

        observers.append(log_call)
    if config.otel:
        from rllm import telemetry
        from rllm.gateway.call_spans import record_span

        telemetry.enable(response_ids=config.otel_response_ids)
        observers.append(record_span)
    return tuple(observers)
