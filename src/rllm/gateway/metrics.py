"""Metrics of calls for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rllm.gateway.upstream.base import Upstream
from rllm.gateway.upstream.pool import UpstreamPool

_PREFIX = "rllm_gateway_"
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics(Collector):
    """Metrics of one gateway and of its pool of upstreams, if it has one.

    It is used in one event loop, so numbers without labels are plain attributes.
    """

    def __init__(self, upstream: Upstream | None = None) -> None:
        self.in_flight = self.store_pending = 0
        self.num_traces = self.num_failed = self.num_prompt_tokens = self.num_response_tokens = 0
        self._pool = upstream if isinstance(upstream, UpstreamPool) else None
        self._registry = registry = CollectorRegistry()
        registry.register(self)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(_PREFIX + name, help, ["mode"], buckets=_BUCKETS_S, registry=registry)

        labels = ["dialect", "mode", "status"]
        # Looking labels up costs more than counting.
        self._requests = cache(Counter(f"{_PREFIX}requests", "Model calls answered.", labels, registry=registry).labels)
        self._seconds = cache(histogram("request_seconds", "Time to the whole answer.").labels)
        first = histogram("first_token_seconds", "Time to the first piece of a streamed answer.")
        self._first_token_seconds = first.labels("stream")

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
        self.num_traces += num_traces
        self.num_failed += num_failed
        self.num_prompt_tokens += num_prompt_tokens
        self.num_response_tokens += num_response_tokens
        if first_token_s is not None:
            self._first_token_seconds.observe(first_token_s)

    def render(self, *, store_pending: int) -> str:
        """Return all metrics in Prometheus' text format, for `GET /metrics`."""
        self.store_pending = store_pending
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(f"{_PREFIX}traces", "Durable traces.", self.num_traces)
        yield CounterMetricFamily(f"{_PREFIX}failed_traces", "Durable traces of failed calls.", self.num_failed)
        yield CounterMetricFamily(f"{_PREFIX}prompt_tokens", "Captured prompt ids.", self.num_prompt_tokens)
        yield CounterMetricFamily(f"{_PREFIX}response_tokens", "Captured sampled ids.", self.num_response_tokens)
        yield GaugeMetricFamily(f"{_PREFIX}requests_in_flight", "Model calls in progress.", self.in_flight)
        yield GaugeMetricFamily(f"{_PREFIX}store_pending", "Writes that are not durable yet.", self.store_pending)
        if (pool := self._pool) is None:
            return
        yield GaugeMetricFamily(f"{_PREFIX}calls_waiting", "Calls that wait for an upstream.", pool.num_waiting)
        yield GaugeMetricFamily(f"{_PREFIX}paused", "1 while calls are held by an operator.", int(pool.paused))
        if pool.weight_version is not None:
            yield GaugeMetricFamily(f"{_PREFIX}weight_version", "Published weight version.", pool.weight_version)
        prefix, labels = f"{_PREFIX}upstream_", ["upstream"]
        up = GaugeMetricFamily(f"{prefix}up", "1 if the upstream answers, as far as is known.", labels=labels)
        in_flight = GaugeMetricFamily(f"{prefix}in_flight", "Calls in progress at the upstream.", labels=labels)
        calls = CounterMetricFamily(f"{prefix}calls", "Calls sent to the upstream.", labels=labels)
        for replica in pool.replicas:
            up.add_metric([replica.address], int(replica.up))
            in_flight.add_metric([replica.address], replica.in_flight)
            calls.add_metric([replica.address], replica.num_calls)
        yield from (up, in_flight, calls)
