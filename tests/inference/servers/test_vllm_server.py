"""Lifetime of a server: start, supervision, restart, stop; over a program with vLLM's routes and no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, InferenceError
from rllm.gateway.upstream.policy_server import ServedEngine
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.servers.command import ServeOptions
from rllm.inference.servers.control import FileTransfer, LoraLoad, Reload, VLLMControl, choose_handover
from rllm.inference.servers.vllm_server import VLLMServer, free_port
from rllm.testing.tiny_policy import train_tokenizer

from ...waiting import wait_for

STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 60.0

Start = Callable[..., VLLMServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(prints=["..."], exits=1)`: a server of that behaviour; stopped after the test."""
    started: list[VLLMServer] = []

    def start_one(
        *, port: int | None = None, start_timeout_s: float = PATIENCE_S, max_restarts: int = 2, **behaviour: Any
    ) -> VLLMServer:
        (tmp_path / "behaviour.json").write_text(json.dumps(behaviour))
        server = VLLMServer.start(
            ServeOptions(model="m", port=port or free_port()),
            command=[sys.executable, str(STAND_IN), str(tmp_path)],
            log=tmp_path / "run" / "vllm.log",
            start_timeout_s=start_timeout_s,
            max_restarts=max_restarts,
            watch_interval_s=0.05,
        )
        started.append(server)
        return server

    yield start_one
    for server in started:
        server.close()


def starts(folder: Path) -> list[int]:
    """Return the process ids of all starts."""
    return [int(line.split()[0]) for line in (folder / "starts").read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_server_is_started_and_stopped(start: Start, tmp_path: Path) -> None:
    server = start(prints=["loading the model"])
    [pid] = starts(tmp_path)
    assert server.is_ready
    assert server.control.models() == ["policy"]
    log = (tmp_path / "run" / "vllm.log").read_text()
    assert log.startswith("$ ")
    assert "--logprobs-mode processed_logprobs" in log
    assert log.endswith("loading the model\n")
    server.close()
    server.close()
    assert not is_running(pid)
    assert not server.is_ready


def test_key_of_the_environment_is_sent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = start()
    assert server.control.models() == ["policy"]
    with pytest.raises(InferenceError, match="401"):
        VLLMControl(server.url).models()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (
            "  Value error, Model architectures ['GhostForCausalLM'] are not supported for now.",
            "does not know the model",
        ),
        ("OSError: [Errno 98] Address already in use", "another program has the port"),
        ("ValueError: Free memory on device (3/24 GiB) is less than desired", r"lower vllm\.gpu_memory"),
        ("vllm: error: unrecognized arguments: --nonsense", r"see vllm\.args"),
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=40 isa=1", "head size"),
        ("KeyError: invalid tool call parser: hermse (chose from { hermes })", r"model\.tool_parser"),
        (
            "non-default args: {'tool_call_parser': 'hermes'}\nRuntimeError: new",
            r"vLLM ended .*: RuntimeError: new",
        ),
        ("something new", "ended with exit code 3"),
    ],
)
def test_failed_start_error_has_log_and_remedy(start: Start, message: str, expected_message: str) -> None:
    with pytest.raises(InferenceError, match=expected_message) as caught:
        start(prints=["first", message], exits=3)
    assert message in str(caught.value)


@pytest.mark.slow
def test_server_that_never_becomes_healthy_is_stopped_with_its_output(start: Start, tmp_path: Path) -> None:
    began = time.monotonic()
    start()
    seconds = max(4, round(5 * (time.monotonic() - began)))  # enough to print something, on a busy machine too
    message = rf"vllm\.start_timeout_s={seconds}"
    with pytest.raises(InferenceError, match=message) as caught:
        start(prints=["Loading weights 3 %"], hangs=True, start_timeout_s=float(seconds))
    assert "Loading weights 3 %" in str(caught.value)
    assert not any(map(is_running, starts(tmp_path)[1:]))


def test_occupied_port_is_reported(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"vllm\.port={port}"):
            start(port=port)
    assert not (tmp_path / "starts").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [("127.0.0.1:8000", r"vllm\.url"), ("http://127.0.0.1:1/v1", r"vllm\.url=.*/v1")],
)
def test_address_without_a_server_is_reported(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMServer.join(url)


def test_crashed_server_is_restarted_with_its_weights(start: Start, tmp_path: Path) -> None:
    server = start()
    recovered = threading.Event()

    def recover() -> None:
        assert not server.is_ready, "no call may reach a server without its weights"
        server.control.set_weight_version("run:7")
        recovered.set()

    server.control.set_weight_version("run:7")
    server.expect("run:7")
    server.watch(recover)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    assert recovered.wait(PATIENCE_S)
    server.await_ready()
    assert len(starts(tmp_path)) == 2
    assert server.num_restarts == 1
    assert server.control.weight_version() == "run:7"


def test_server_that_lost_its_weights_receives_them_again(start: Start) -> None:
    ours = start()
    joined = VLLMServer.join(ours.url, watch_interval_s=0.05)
    recovered = threading.Event()

    def recover() -> None:
        joined.control.set_weight_version("run:2")
        recovered.set()

    joined.control.set_weight_version("run:2")
    joined.expect("run:2")
    joined.watch(recover)
    ours.control.set_weight_version("default")  # as a server reports after a restart by another user
    assert recovered.wait(PATIENCE_S)
    joined.await_ready()
    joined.close()
    assert ours.control.is_healthy(), "a joined server is not stopped"


@pytest.mark.slow
@pytest.mark.parametrize("takes_s_to_end", [0.0, 0.5])
def test_crash_without_remaining_restarts_is_reported(start: Start, takes_s_to_end: float) -> None:
    server = start(max_restarts=0, prints=["all was well"], takes_s_to_end=takes_s_to_end)
    server.watch(lambda: None)
    with pytest.raises(OSError, match=r"closed|reset|disconnected"):
        urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/die")
    wait_for(lambda: server.failure is not None)
    with pytest.raises(
        InferenceError, match=r"the last time: it has ended\. The end of its log .*vllm\.log\):\nall was well"
    ):
        server.await_ready()


@pytest.mark.slow
def test_server_that_crashes_repeatedly_is_not_restarted(start: Start, tmp_path: Path) -> None:
    server = start(max_restarts=1)

    def recover() -> None:
        raise InferenceError("it does not take the weights")

    server.watch(recover)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: server.failure is not None)
    with pytest.raises(InferenceError, match=r"vllm\.max_restarts=1; the last time: it does not take the weights"):
        server.await_ready()
    assert not server.is_ready


def test_waiting_for_a_dead_server_raises_with_its_log(start: Start, tmp_path: Path) -> None:
    server = start(max_restarts=1)
    server.watch(lambda: None)
    (tmp_path / "behaviour.json").write_text(json.dumps({"prints": ["RuntimeError: no more"], "exits": 3}))
    waiting = ServedEngine(
        server.url,
        model="policy",
        tokens=TokenPrompts(train_tokenizer(["a fig"], vocab_size=300)),
        facts={},
        is_ready=lambda: server.is_ready,
        failure=lambda: server.failure,
    )
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: not server.is_ready)
    with pytest.raises(InferenceError, match=r"vllm\.max_restarts=1; the last time: .*exit code 3") as message:
        asyncio.run(waiting.get_model_response([{"role": "user", "content": "a fig"}]))
    assert f"The end of its log ({tmp_path / 'run' / 'vllm.log'}):" in str(message.value)
    assert "RuntimeError: no more" in str(message.value)
    waiting.close()


def test_dead_server_without_supervision_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    server = start(prints=["all is well"])
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    wait_for(server.is_gone)
    with pytest.raises(InferenceError, match=r"has stopped\. The end of its log .*\nall is well"):
        server.await_ready()


def test_unexpected_restart_error_is_raised_to_waiting_callers(start: Start, tmp_path: Path) -> None:
    server = start()

    def recover() -> None:
        raise ZeroDivisionError("one by none")

    server.watch(recover)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: server.failure is not None)
    with pytest.raises(InferenceError, match="one by none"):
        server.await_ready()


def test_server_stops_when_its_owner_is_killed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    port = free_port()
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rllm.inference.servers.vllm_server import ServerProcess\n"
        f"command = [sys.executable, {str(STAND_IN)!r}, {str(tmp_path)!r}, 'serve', 'm', '--port', '{port}']\n"
        f"server = ServerProcess(command, {{}}, Path({str(tmp_path / 'log')!r}), scratch=Path({str(scratch)!r}))\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: (tmp_path / "starts").exists() and bool(starts(tmp_path)))
    finally:
        owner.kill()
        owner.wait()
    [pid] = starts(tmp_path)
    wait_for(lambda: not is_running(pid))
    wait_for(lambda: not scratch.exists())


def test_fastest_weight_transfer_offered_by_the_server_is_used(start: Start) -> None:
    server = start()
    assert isinstance(choose_handover(server.control, lora=False), FileTransfer)
    assert isinstance(choose_handover(server.control, lora=True), LoraLoad)


def test_weights_are_loaded_from_disk_without_our_extension(start: Start) -> None:
    assert isinstance(choose_handover(start(backend=None).control, lora=False), Reload)


@pytest.mark.parametrize(
    ("lacks", "lora", "message"),
    [
        (["/pause", "/weight_info"], False, r"lacks /pause, /weight_info \(VLLM_SERVER_DEV_MODE=1\)"),
        (["/v1/load_lora_adapter"], True, "takes no adapters while it runs"),
    ],
)
def test_server_without_weight_updates_is_rejected(start: Start, lacks: list[str], lora: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_handover(start(lacks=lacks).control, lora=lora)
