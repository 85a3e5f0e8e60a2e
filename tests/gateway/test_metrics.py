from rllm.gateway.metrics import Metrics


def test_metrics_are_in_the_prometheus_text_format():
    metrics = Metrics()
    metrics.observe("json", 200, 0.02)
    metrics.observe("json", 200, 700.0)
    text = metrics.render(store_pending=3)
    assert 'rllm_gateway_requests_total{mode="json",status="200"} 2\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="0.01"} 0\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="0.025"} 1\n' in text
    assert 'rllm_gateway_request_seconds_bucket{le="+Inf"} 2\n' in text
    assert "rllm_gateway_request_seconds_count 2\n" in text
    assert "rllm_gateway_store_pending 3\n" in text
