"""`rllm gateway --log-format json --otel`, as a process that is read and collected from."""

import json
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


def test_every_call_is_a_line_of_json_and_a_span(tmp_path, collector):
    with ScriptedServer(ScriptedEngine(["a secret"])) as upstream:
        database = f"sqlite:///{tmp_path / 't.db'}"
        arguments = [
            "--upstream",
            upstream.base_url,
            "--store",
            database,
            "--port",
            "0",
            "--log-format",
            "json",
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
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [(line["message"], line["status"], line.get("session_id")) for line in lines] == [
        ("call", 200, "s"),
        ("call", 400, "s"),
        ("call", 401, None),
    ]
    assert lines[0]["trace_ids"] == [answer.json()["id"]]
    assert {line["logger"] for line in lines} == {"rllm.gateway.observability"}
    assert not re.search("secret|key-of-gateway|wrong-key", errors)
    assert collector.named("chat scripted").attributes["rllm.trace_ids"] == lines[0]["trace_ids"]
