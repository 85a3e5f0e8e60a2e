from __future__ import annotations

import pytest

from rllm.engine import ray_cluster
from rllm.engine.ray_cluster import url_elsewhere


@pytest.mark.parametrize(
    ("host", "url", "name", "elsewhere"),
    [
        ("10.0.0.7", "http://10.0.0.7:80/v1", "10.0.0.9", "http://10.0.0.7:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000", "10.0.0.9", "http://10.0.0.9:8000"),
        ("::", "http://[::1]:8000/v1", "10.0.0.9", "http://10.0.0.9:8000/v1"),
        ("::", "http://[::1]:8000", "fd00::9", "http://[fd00::9]:8000"),
    ],
)
def test_other_machines_reach_the_driver_by_its_host_name(
    host: str, url: str, name: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "own_address", lambda: name)
    assert url_elsewhere(url, host) == elsewhere
