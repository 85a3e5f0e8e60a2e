"""The address of a cluster, checked before anything else."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from rllm.engine import ray_cluster
from rllm.engine.ray_cluster import check_address
from rllm.errors import ConfigError


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("address", [None, "auto", "local"])
def test_missing_address_is_left_to_ray(address: str | None) -> None:
    check_address(address)


def test_reachable_address_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check_address(f"127.0.0.1:{listener.getsockname()[1]}")


def test_unreachable_address_error_names_the_setting_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"ray.address='127.0.0.1:{port}'"):
        check_address(f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="RAY_ADDRESS='127"):
        check_address(None)


def test_invalid_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"ray\.address='head'"):
        check_address("head")


def test_program_outside_of_the_cluster_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="ray job submit"):
        check_address("ray://10.0.0.1:10001")


def test_joining_a_cluster_keeps_the_sigterm_handler() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with ray_cluster.sigterm_kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does to install its own
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
