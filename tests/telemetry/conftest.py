import pytest

from rllm import telemetry

from .collector import collecting


@pytest.fixture
def collector(monkeypatch):
    """Spans that this process exports once telemetry is enabled."""
    with collecting(monkeypatch) as collected:
        yield collected


@pytest.fixture
def spans(collector):
    """The same, with telemetry enabled."""
    telemetry.enable()
    return collector
