"""What the gateway counts, in the Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters of one gateway; touched only from its event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """By `json` or `stream`, and HTTP status."""
        self.traces = 0
        self.failed_traces = 0
        self.prompt_tokens = 0
        self.response_tokens = 0
        self._latencies = [0] * (len(_BUCKETS_S) + 1)
        self._latency_sum = 0.0

    def observe(self, mode: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[mode, status] += 1
        self._latencies[bisect_left(_BUCKETS_S, seconds)] += 1
        self._latency_sum += seconds

    def render(self, *, store_pending: int) -> str:
        """All of it, as `GET /metrics` answers."""
        requests = [
            f'rllm_gateway_requests_total{{mode="{mode}",status="{status}"}} {count}'
            for (mode, status), count in sorted(self.requests.items())
        ]
        cumulative = list(accumulate(self._latencies))
        buckets = [
            f'rllm_gateway_request_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip((*_BUCKETS_S, "+Inf"), cumulative, strict=True)
        ]
        lines = [
            *_family("rllm_gateway_requests_total", "counter", "Model calls answered.", requests),
            *_single("rllm_gateway_requests_in_flight", "gauge", "Model calls being answered.", self.in_flight),
            *_single("rllm_gateway_traces_total", "counter", "Traces made durable.", self.traces),
            *_single("rllm_gateway_failed_traces_total", "counter", "Of these, calls that failed.", self.failed_traces),
            *_single("rllm_gateway_prompt_tokens_total", "counter", "Prompt ids captured.", self.prompt_tokens),
            *_single("rllm_gateway_response_tokens_total", "counter", "Sampled ids captured.", self.response_tokens),
            *_single("rllm_gateway_store_pending", "gauge", "Writes not yet durable.", store_pending),
            *_family("rllm_gateway_request_seconds", "histogram", "Time to the whole answer.", buckets),
            f"rllm_gateway_request_seconds_sum {self._latency_sum}",
            f"rllm_gateway_request_seconds_count {cumulative[-1]}",
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, help: str, samples: list[str]) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}", *samples]


def _single(name: str, kind: str, help: str, value: float) -> list[str]:
    return _family(name, kind, help, [f"{name} {value}"])
