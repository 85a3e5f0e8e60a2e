"""Observability of calls: metrics for Prometheus, and OpenTelemetry spans; ids, counts and times, and no texts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rllm import telemetry
from rllm.gateway.model_call import ModelCall
from rllm.gateway.upstream.pool import UpstreamPool


def record_span(call: ModelCall, *, dialect: str, is_stream: bool, status: int) -> None:
    """Record a call as a span, whose parent is that of its W3C headers, or else of its session; none for a retry."""
    if not call.traces:
        return
    error_type = str(status) if status >= 400 else None
    broken = next((trace.finish_reason for trace in call.traces if trace.finish_reason in ("abort", "error")), None)
    telemetry.record_call(
        call.traces,
        operation="text_completion" if dialect == "completions" else "chat",
        error_type=error_type or broken,
        headers=call.trace_context or call.session.trace_context,
        attributes={"rllm.dialect": dialect, "rllm.stream": is_stream},
    )


# --- metrics ----------------------------------------------------------------------------------------------------------

_PREFIX = "rllm_gateway_"
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts of durations, by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self.sum += seconds


class Metrics:
    """Counters of one gateway; touched only from its event loop, so they are plain numbers until they are scraped."""

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

    def render(self, *, store_pending: int, pool: UpstreamPool | None = None) -> str:
        """Return all metrics in Prometheus' text format, as `GET /metrics` answers."""
        registry = CollectorRegistry()
        registry.register(_Scrape(self, store_pending, pool))
        return generate_latest(registry).decode()


class _Scrape(Collector):
    """The metrics as Prometheus' client takes them."""

    def __init__(self, metrics: Metrics, store_pending: int, pool: UpstreamPool | None) -> None:
        self._metrics = metrics
        self._store_pending = store_pending
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily(
            f"{_PREFIX}requests", "Model calls answered.", labels=["dialect", "mode", "status"]
        )
        for (dialect, mode, status), count in sorted(metrics.requests.items()):
            requests.add_metric([dialect, mode, str(status)], count)
        yield requests
        yield GaugeMetricFamily(f"{_PREFIX}requests_in_flight", "Model calls in progress.", metrics.in_flight)
        yield CounterMetricFamily(f"{_PREFIX}traces", "Durable traces.", metrics.traces)
        yield CounterMetricFamily(f"{_PREFIX}failed_traces", "Durable traces of failed calls.", metrics.failed_traces)
        yield CounterMetricFamily(f"{_PREFIX}prompt_tokens", "Captured prompt ids.", metrics.prompt_tokens)
        yield CounterMetricFamily(f"{_PREFIX}response_tokens", "Captured sampled ids.", metrics.response_tokens)
        yield _histogram("request_seconds", "Time to the whole answer.", metrics.seconds)
        first = {"stream": metrics.first_token_seconds}
        yield _histogram("first_token_seconds", "Time to the first piece of a streamed answer.", first)
        yield GaugeMetricFamily(f"{_PREFIX}store_pending", "Writes that are not durable yet.", self._store_pending)
        if self._pool is not None:
            yield from _upstreams(self._pool)


def _histogram(name: str, help: str, by_mode: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"{_PREFIX}{name}", help, labels=["mode"])
    for mode, seen in sorted(by_mode.items()):
        bounds = (*map(str, _BUCKETS_S), "+Inf")
        family.add_metric([mode], list(zip(bounds, accumulate(seen.counts), strict=True)), seen.sum)
    return family


def _upstreams(pool: UpstreamPool) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"{_PREFIX}calls_waiting", "Calls that wait for an upstream.", pool.num_waiting)
    yield GaugeMetricFamily(f"{_PREFIX}paused", "1 while calls are held by an operator.", int(pool.paused))
    if pool.weight_version is not None:
        yield GaugeMetricFamily(f"{_PREFIX}weight_version", "Published weight version.", pool.weight_version)
    prefix = f"{_PREFIX}upstream_"
    up = GaugeMetricFamily(f"{prefix}up", "1 if the upstream answers, as far as is known.", labels=["upstream"])
    in_flight = GaugeMetricFamily(f"{prefix}in_flight", "Calls in progress at the upstream.", labels=["upstream"])
    calls = CounterMetricFamily(f"{prefix}calls", "Calls sent to the upstream.", labels=["upstream"])
    for replica in pool.replicas:
        up.add_metric([replica.address], int(replica.up))
        in_flight.add_metric([replica.address], replica.in_flight)
        calls.add_metric([replica.address], replica.num_calls)
    yield from (up, in_flight, calls)
