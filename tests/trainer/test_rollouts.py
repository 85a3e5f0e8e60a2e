"""Checks of rollouts on Ray before Ray is used; a real cluster is tested in tests/verl."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from typing import Any

import pytest

from rllm.engine.capture import RemoteGateway
from rllm.engine.ray_cluster import check_address
from rllm.errors import ConfigError, InferenceError, MissingDependencyError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.trainer.agent_sft_trainer import DemonstrationRollouts
from rllm.trainer.config import load_config
from rllm.trainer.rollout_sources import FunctionSource
from rllm.trainer.rollouts import check_rollouts, gateway_config, remote_gateway, uses_a_cluster

from ..ports import free_port


def agent(question: str) -> float:
    return 1.0


DOOR = FunctionSource(agent_run_func=agent)


@pytest.fixture(autouse=True)
def no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    "setting", ["address=10.0.0.1:6379", "num_actors=2", "concurrency=2", "cpus_per_actor=1", "working_dir=/tmp"]
)
def test_ray_settings_without_ray_are_rejected(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=r"ray\.\w+=.* would have no effect without processes on Ray; set rollout.runner=ray"
    ):
        check_rollouts(load_config([f"ray.{setting}"]), DOOR)


def test_cluster_address_applies_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        config = load_config(["backend=verl", f"ray.address={address}"])
        check_rollouts(config, DOOR)
    assert uses_a_cluster(config)
    assert not uses_a_cluster(load_config(["backend=verl"]))
    assert not uses_a_cluster(load_config([]))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert uses_a_cluster(load_config(["rollout.runner=ray"]))


def test_unreachable_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(
        ConfigError, match=rf"ray.address='127.0.0.1:{port}': no Ray cluster answers.*`ray start --head`"
    ):
        check_address(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"ray.address='head': use host:port"):
        check_address("head")
    with pytest.raises(
        ConfigError, match=r"'ray://head:10001': the trainer and the processes on the nodes .*`ray job submit`"
    ):
        check_address("ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS='127.0.0.1:{port}': no Ray cluster answers"):
        check_address(None)
    monkeypatch.delenv("RAY_ADDRESS")
    check_address(None)


def test_settings_incompatible_with_ray_are_rejected() -> None:
    with pytest.raises(ConfigError, match="has no effect on demonstrations"):
        check_rollouts(load_config(["rollout.runner=ray"]), DemonstrationRollouts.__new__(DemonstrationRollouts))
    with pytest.raises(ConfigError, match=r"ray.working_dir='/no/such': no such folder"):
        check_rollouts(load_config(["rollout.runner=ray", "ray.working_dir=/no/such"]), DOOR)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_missing_ray_error_names_the_extra() -> None:
    with pytest.raises(MissingDependencyError, match=r"rollout.runner=ray needs the package 'ray'"):
        check_rollouts(load_config(["rollout.runner=ray"]), DOOR)


def test_each_gateway_of_a_run_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here = gateway_config(load_config(["gateway.port=4321"]))
    assert (here.host, here.port) == ("127.0.0.1", 4321)
    everywhere = gateway_config(load_config(["rollout.runner=ray", "gateway.host=0.0.0.0"]))
    for config in (here, everywhere):
        assert config.session_ids_admit
        assert len(config.api_key or "") >= 32
    monkeypatch.setenv("RLLM_GATEWAY_API_KEY", "chosen")
    assert gateway_config(load_config([])).api_key == "chosen"


@pytest.fixture
def served() -> Any:
    config = GatewayConfig(api_key="secret", session_ids_admit=True, shutdown_timeout_s=1)
    with GatewayServer(MemoryTraceStore(), EngineUpstream(ScriptedEngine(["hello"]), "m"), config) as server:
        yield server


def test_sessions_and_traces_are_read_from_a_remote_gateway(served: GatewayServer) -> None:
    remote = remote_gateway(served)
    assert remote == RemoteGateway(url=served.url, api_key="secret")
    remote.check()
    url = remote.open_session("one", metadata={"task_id": "t"}, sampling={"temperature": 0.5})
    assert url == f"{served.url}/sessions/one/v1"
    assert remote.by_session("one") == []
    with pytest.raises(InferenceError, match=r"POST .*/sessions was answered with 401") as refused:
        RemoteGateway(url=served.url, api_key="wrong").open_session("two")
    assert refused.value.status_code == 401
    with pytest.raises(InferenceError, match="cannot be reached") as unreached:
        RemoteGateway(url=f"http://127.0.0.1:{free_port()}", api_key="secret").check()
    assert unreached.value.status_code == 503


@pytest.mark.parametrize(("status", "message"), [(200, "not a gateway"), (502, "answered with 502")])
def test_proxy_answering_for_the_gateway_is_reported(status: int, message: str) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(("a" + "é" * 200).encode())  # its 200th byte is half of a character

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as proxy:
        threading.Thread(target=proxy.handle_request).start()
        with pytest.raises(InferenceError, match=message):
            RemoteGateway(url=f"http://127.0.0.1:{proxy.server_port}", api_key=None).check()
