from rllm.gateway.metrics import Metrics
from rllm.gateway.upstream import UpstreamPool


def test_metrics_are_in_the_prometheus_text_format():
    metrics = Metrics()
    metrics.observe("chat", "json", 200, 0.02)
    metrics.observe("chat", "json", 200, 700.0)
    metrics.observe("messages", "stream", 502, 0.3)
    metrics.count_traces(num_traces=1, num_failed=0, num_prompt_tokens=5, num_response_tokens=7, first_token_s=0.01)
    text = metrics.render(store_pending=3)
    assert 'rllm_gateway_requests_total{dialect="chat",mode="json",status="200"} 2.0\n' in text
    assert 'rllm_gateway_requests_total{dialect="messages",mode="stream",status="502"} 1.0\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="0.01",mode="json"} 0.0\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="0.025",mode="json"} 1.0\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="+Inf",mode="json"} 2.0\n' in text
    assert 'rllm_gateway_request_seconds_sum{mode="json"} 700.02\n' in text
    assert 'rllm_gateway_request_seconds_count{mode="stream"} 1.0\n' in text
    assert 'rllm_gateway_first_token_seconds_bucket{le="0.01",mode="stream"} 1.0\n' in text
    assert "rllm_gateway_store_pending 3.0\n" in text
    assert "upstream" not in text


def test_each_family_is_described_once_and_contiguous():
    metrics = Metrics()
    for dialect in ("chat", "responses"):
        for mode in ("json", "stream"):
            metrics.observe(dialect, mode, 200, 0.1)
    lines = metrics.render(store_pending=0).splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    current = ""
    for line in lines:
        current = line.split()[2] if line.startswith("#") else current
        assert line.startswith(("#", current))


def test_replicas_have_health_metrics():
    pool = UpstreamPool(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    well, ill = pool.replicas
    well.in_flight, well.num_calls = 2, 7
    pool.publish(4)
    ill.failed(ConnectionError("gone"))
    text = Metrics(pool).render(store_pending=0)
    assert "rllm_gateway_calls_waiting 0.0\n" in text
    assert 'rllm_gateway_upstream_up{upstream="http://127.0.0.1:1/v1"} 1.0\n' in text
    assert 'rllm_gateway_upstream_up{upstream="http://127.0.0.1:2/v1"} 0.0\n' in text
    assert 'rllm_gateway_upstream_in_flight{upstream="http://127.0.0.1:1/v1"} 2.0\n' in text
    assert 'rllm_gateway_upstream_calls_total{upstream="http://127.0.0.1:1/v1"} 7.0\n' in text
    assert "rllm_gateway_weight_version 4.0\n" in text
