import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..ports import free_port

LIGHT = "import sys; sys.modules.update(openai=None, torch=None); from rllm.__main__ import main; main()"
"""The command without openai and torch, which take seconds to import, and which it must not need."""


def test_gateway_prints_its_address_serves_and_stops_on_a_signal(tmp_path):
    database = tmp_path / "traces.db"
    with ScriptedServer(ScriptedEngine(["hello"])) as upstream:
        arguments = [
            "--upstream",
            upstream.base_url,
            "--store",
            f"sqlite:///{database}",
            "--port",
            "0",
            "--model",
            "big",
        ]
        command = [sys.executable, "-c", LIGHT, "gateway", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            greeting = [process.stdout.readline() for _ in range(6)]
            url = re.search(r"http://\S+", greeting[0]).group()
            assert f"{url}/sessions/SESSION/v1" in "".join(greeting)
            assert str(database) in "".join(greeting)
            body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
            answer = httpx.post(f"{url}/sessions/s/v1/chat/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["message"]["content"] == "hello"
            assert upstream.requests[0]["model"] == "big"
            assert len(httpx.get(f"{url}/sessions/s/traces", timeout=60).json()["traces"]) == 1
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "every acknowledged call is in the store" in output
        assert errors == ""


@pytest.mark.slow
def test_upstream_that_does_not_list_models_is_a_warning(tmp_path):
    with ScriptedServer(ScriptedEngine(["hello"])) as upstream:
        arguments = ["--upstream", f"{upstream.base_url}/nothing", "--store", str(tmp_path / "t.db"), "--port", "0"]
        command = [sys.executable, "-m", "rllm", "gateway", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(7)]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert lines[6].startswith(f"  WARNING    {upstream.base_url}/nothing")


@pytest.mark.slow
def test_unreachable_upstream_and_closed_pipe_are_tolerated(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    arguments = ["--upstream", "http://127.0.0.1:9", "--store", f"sqlite:///{tmp_path / 't.db'}", "--port", url[17:]]
    command = [sys.executable, "-m", "rllm", "gateway", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `| head` does
        wait_until_listening(process, url)
        assert httpx.get(f"{url}/readyz", timeout=60).status_code == 503
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 0
    assert errors.startswith("upstream http://127.0.0.1:9/v1 is down, and gets no calls until it answers: ")
    assert errors.count("see whether the inference server is running") == 1
    assert errors.count("\n") == 1  # the closed pipe is not mentioned


def wait_until_listening(process, url):
    deadline = time.monotonic() + 60
    while True:
        try:
            return httpx.get(f"{url}/healthz", timeout=60)
        except httpx.ConnectError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_port_in_use_error_names_the_remedy(fails, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = ["--upstream", "http://127.0.0.1:9", "--port", port, "--store", f"sqlite:///{tmp_path / 't.db'}"]
        code, errors = fails("gateway", *given)
    assert code == 2
    assert f"port={port}" in errors
    assert "choose another port" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--upstream", "localhost:8000"], "rllm: --upstream='localhost:8000': "),
        (["--upstream", "http://a b/v1"], "http://a b/v1"),
        (["--upstream", "http://127.0.0.1:9", "--upstream", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1"),
        (["--upstream", "http://127.0.0.1:9", "--hold-s", "0"], "--hold-s=0.0"),
        (["--upstream", "http://127.0.0.1:9", "--host", "0.0.0.0"], "rllm: --host='0.0.0.0' can"),
        (["--upstream", "http://127.0.0.1:9", "--max-body-bytes", "0"], "rllm: --max-body-bytes=0: "),
        (["--upstream", "http://127.0.0.1:9", "--chat-template", "own.jinja"], "without --tokenizer"),
        (["--upstream", "http://127.0.0.1:9", "--store", "redis://x"], "redis"),
    ],
)
def test_invalid_arguments_print_a_message_without_traceback(fails, arguments, named):
    code, errors = fails("gateway", "--port", "0", *arguments)
    assert code == 2
    assert named in errors
    assert "Traceback" not in errors


def test_upstream_is_required(fails):
    code, errors = fails("gateway")
    assert code == 2
    assert "--upstream" in errors


@pytest.mark.slow
def test_several_upstreams_form_a_pool(tmp_path):
    with ScriptedServer(ScriptedEngine(["hello"])) as upstream:
        arguments = ["--upstream", "http://127.0.0.1:9", "--upstream", upstream.base_url, "--port", "0"]
        command = [sys.executable, "-m", "rllm", "gateway", *arguments, "--store", f"sqlite:///{tmp_path / 't.db'}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(6)]
            url = re.search(r"http://\S+", lines[0]).group()
            assert f"http://127.0.0.1:9/v1, {upstream.base_url}" in "".join(lines)
            assert httpx.get(f"{url}/readyz", timeout=60).status_code == 200
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            for _ in range(4):
                assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
            states = [replica["state"] for replica in httpx.get(f"{url}/upstreams", timeout=60).json()["replicas"]]
            assert states == ["down", "up"]
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert errors.startswith("upstream http://127.0.0.1:9/v1 is down")


@pytest.mark.slow
def test_second_ctrl_c_cancels_calls_in_flight(tmp_path):
    with ScriptedServer(ScriptedEngine(["hello"], latency_s=60.0)) as upstream, ThreadPoolExecutor() as threads:
        arguments = ["--upstream", upstream.base_url, "--port", "0", "--store", f"sqlite:///{tmp_path / 't.db'}"]
        command = [sys.executable, "-m", "rllm", "gateway", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = re.search(r"http://\S+", process.stdout.readline()).group()
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            call = threads.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
            while not upstream.requests:
                time.sleep(0.01)
            for _ in range(2):  # as `timeout -s INT` does
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            time.sleep(0.3)
            assert not call.done()
            process.send_signal(signal.SIGINT)
            assert call.result().status_code == 503
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == "1 call cut off at the end of the shutdown time\n"
