"""`rllm gateway --otel`, as a process whose spans are collected."""

import re
import signal
import subprocess
import sys

import httpx
import pytest

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..telemetry.collector import collecting


@pytest.fixture
def collector(monkeypatch):
    with collecting(monkeypatch) as collected:
        yield collected


@pytest.mark.slow
def test_every_call_is_a_span(tmp_path, collector):
    with ScriptedServer(ScriptedEngine(["a secret"])) as upstream:
        database = f"sqlite:///{tmp_path / 't.db'}"
        arguments = [
            "--upstream",
            upstream.base_url,
            "--store",
            database,
            "--port",
            "0",
            "--otel",
        ]
        command = [sys.executable, "-m", "rllm", "gateway", "--api-key", "key-of-gateway", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = re.search(r"http://\S+", process.stdout.readline()).group()
            with httpx.Client(base_url=url, timeout=60, verify=False) as client:
                client.headers["authorization"] = "Bearer key-of-gateway"
                body = {"model": "m", "messages": [{"role": "user", "content": "a secret question"}]}
                answer = client.post("/sessions/s/v1/chat/completions", json=body)
                client.post("/sessions/s/v1/chat/completions", json={})
                client.post("/sessions/s/v1/chat/completions", json=body, headers={"authorization": "Bearer wrong-key"})
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert errors == ""
    assert collector.named("chat scripted").attributes["rllm.trace_ids"] == [answer.json()["id"]]
