"""What the gateway counts, in the Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate

from rllm.gateway.upstream.replica import Replica
from rllm.gateway.upstream.replicas import ReplicaSet

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """How often each duration was seen, by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def render(self, name: str, labels: str) -> list[str]:
        """Its samples; `labels` are those that all of them have, as `mode="json"`."""
        cumulative = list(accumulate(self._counts))
        buckets = [
            f'{name}_bucket{{{labels},le="{bound}"}} {count}'
            for bound, count in zip((*_BUCKETS_S, "+Inf"), cumulative, strict=True)
        ]
        return [*buckets, f"{name}_sum{{{labels}}} {self._sum}", f"{name}_count{{{labels}}} {cumulative[-1]}"]


class Metrics:
    """Counters of one gateway; touched only from its event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By wire format, `json`, `stream` or `count`, and HTTP status."""
        self.traces = 0
        self.failed_traces = 0
        self.prompt_tokens = 0
        self.response_tokens = 0
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        """By `json`, `stream` or `count`."""
        self.first_token_seconds = Histogram()

    def observe(self, dialect: str, mode: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[dialect, mode, status] += 1
        self.seconds[mode].observe(seconds)

    def count_traces(
        self,
        *,
        num_traces: int,
        num_failed: int,
        num_prompt_tokens: int,
        num_response_tokens: int,
        first_token_s: float | None,
    ) -> None:
        """Count the traces of one call."""
        self.traces += num_traces
        self.failed_traces += num_failed
        self.prompt_tokens += num_prompt_tokens
        self.response_tokens += num_response_tokens
        if first_token_s is not None:
            self.first_token_seconds.observe(first_token_s)

    def render(self, *, store_pending: int, replicas: ReplicaSet | None = None) -> str:
        """All of it, as `GET /metrics` answers."""
        lines = [*self._requests(), *self._traces(), *self._latencies(), *_upstreams(replicas)]
        lines += _single("rllm_gateway_store_pending", "gauge", "Writes not yet durable.", store_pending)
        return "\n".join(lines) + "\n"

    def _requests(self) -> list[str]:
        name = "rllm_gateway_requests_total"
        samples = [
            f'{name}{{dialect="{dialect}",mode="{mode}",status="{status}"}} {count}'
            for (dialect, mode, status), count in sorted(self.requests.items())
        ]
        return [
            *_family(name, "counter", "Model calls answered.", samples),
            *_single("rllm_gateway_requests_in_flight", "gauge", "Model calls being answered.", self.in_flight),
        ]

    def _traces(self) -> list[str]:
        return [
            *_single("rllm_gateway_traces_total", "counter", "Traces made durable.", self.traces),
            *_single("rllm_gateway_failed_traces_total", "counter", "Of these, calls that failed.", self.failed_traces),
            *_single("rllm_gateway_prompt_tokens_total", "counter", "Prompt ids captured.", self.prompt_tokens),
            *_single("rllm_gateway_response_tokens_total", "counter", "Sampled ids captured.", self.response_tokens),
        ]

    def _latencies(self) -> list[str]:
        whole, first = "rllm_gateway_request_seconds", "rllm_gateway_first_token_seconds"
        wholes = [line for mode, seen in sorted(self.seconds.items()) for line in seen.render(whole, f'mode="{mode}"')]
        firsts = self.first_token_seconds.render(first, 'mode="stream"')
        return [
            *_family(whole, "histogram", "Time to the whole answer.", wholes),
            *_family(first, "histogram", "Time to the first piece of a streamed answer.", firsts),
        ]


def _upstreams(replicas: ReplicaSet | None) -> list[str]:
    """What is known of each replica of a pool; nothing where there is none."""
    if replicas is None:
        return []

    def each(name: str, kind: str, help: str, value_of: Callable[[Replica], float | None]) -> list[str]:
        name = f"rllm_gateway_upstream_{name}"
        values = {item.address: value_of(item) for item in replicas}
        known = [f'{name}{{upstream="{address}"}} {value}' for address, value in values.items() if value is not None]
        return _family(name, kind, help, known)

    return [
        *_single("rllm_gateway_calls_waiting", "gauge", "Calls held until an upstream is free.", replicas.num_waiting),
        *each("up", "gauge", "Whether it answers, as far as is known.", lambda item: int(item.up)),
        *each("paused", "gauge", "Whether it is held by an operator.", lambda item: int(item.paused)),
        *each("in_flight", "gauge", "Calls that it is answering.", lambda item: item.in_flight),
        *each("calls_total", "counter", "Calls that went to it.", lambda item: item.num_calls),
        *each("weight_version", "gauge", "Its weights, as far as was said.", lambda item: item.weight_version),
    ]


def _family(name: str, kind: str, help: str, samples: list[str]) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}", *samples]


def _single(name: str, kind: str, help: str, value: float) -> list[str]:
    return _family(name, kind, help, [f"{name} {value}"])
