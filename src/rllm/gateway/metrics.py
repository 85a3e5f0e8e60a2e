"""Metrics of calls for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rllm.gateway.upstream.base import Upstream
from rllm.gateway.upstream.pool import UpstreamPool

_PREFIX = "rllm_gateway_"
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Metrics of one gateway and of its pool of upstreams, if it has one."""

    def __init__(self, upstream: Upstream | None = None) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(_PREFIX + name, help, labels, registry=registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(_PREFIX + name, help, ["mode"], buckets=_BUCKETS_S, registry=registry)

        # Looking labels up costs more than counting.
        self._requests = cache(counter("requests", "Model calls answered.", ["dialect", "mode", "status"]).labels)
        self.in_flight = 0
        in_flight = Gauge(f"{_PREFIX}requests_in_flight", "Model calls in progress.", registry=registry)
        in_flight.set_function(lambda: self.in_flight)
        self._traces = counter("traces", "Durable traces.")
        self._failed_traces = counter("failed_traces", "Durable traces of failed calls.")
        self._prompt_tokens = counter("prompt_tokens", "Captured prompt ids.")
        self._response_tokens = counter("response_tokens", "Captured sampled ids.")
        self._seconds = cache(histogram("request_seconds", "Time to the whole answer.").labels)
        first = histogram("first_token_seconds", "Time to the first piece of a streamed answer.")
        self._first_token_seconds = first.labels("stream")
        self._store_pending = Gauge(f"{_PREFIX}store_pending", "Writes that are not durable yet.", registry=registry)
        if isinstance(upstream, UpstreamPool):
            registry.register(_PoolCollector(upstream))

    def observe(self, dialect: str, mode: str, status: int, seconds: float) -> None:
        """Count one answered request; its mode is `json`, `stream` or `count`."""
        self._requests(dialect, mode, status).inc()
        self._seconds(mode).observe(seconds)

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
        self._traces.inc(num_traces)
        if num_failed:
            self._failed_traces.inc(num_failed)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._response_tokens.inc(num_response_tokens)
        if first_token_s is not None:
            self._first_token_seconds.observe(first_token_s)

    def render(self, *, store_pending: int) -> str:
        """Return all metrics in Prometheus' text format, as `GET /metrics` answers."""
        self._store_pending.set(store_pending)
        return generate_latest(self._registry).decode()


class _PoolCollector(Collector):
    """State of the replicas of a pool."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        pool, prefix = self._pool, f"{_PREFIX}upstream_"
        yield GaugeMetricFamily(f"{_PREFIX}calls_waiting", "Calls that wait for an upstream.", pool.num_waiting)
        yield GaugeMetricFamily(f"{_PREFIX}paused", "1 while calls are held by an operator.", int(pool.paused))
        if pool.weight_version is not None:
            yield GaugeMetricFamily(f"{_PREFIX}weight_version", "Published weight version.", pool.weight_version)
        up = GaugeMetricFamily(f"{prefix}up", "1 if the upstream answers, as far as is known.", labels=["upstream"])
        in_flight = GaugeMetricFamily(f"{prefix}in_flight", "Calls in progress at the upstream.", labels=["upstream"])
        calls = CounterMetricFamily(f"{prefix}calls", "Calls sent to the upstream.", labels=["upstream"])
        for replica in pool.replicas:
            up.add_metric([replica.address], int(replica.up))
            in_flight.add_metric([replica.address], replica.in_flight)
            calls.add_metric([replica.address], replica.num_calls)
        yield from (up, in_flight, calls)
