"""`rllm view`, as a user runs it."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from ..viewer.run_folders import large_run
from .conftest import here


@pytest.fixture
def serve(tmp_path):
    """Start the viewer in a folder with one run, and return its address."""
    large_run(tmp_path / "runs/one", num_episodes=4)
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "rllm", "view", *arguments, "--port", "0"]
        viewer = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        started.append(viewer)
        return re.search(r"http://\S+", viewer.stdout.readline())[0]

    yield start
    for viewer in started:
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(60) == 0
        viewer.stdout.close()


@pytest.mark.slow
def test_empty_folder_has_a_hint(tmp_path):
    command = [sys.executable, "-m", "rllm", "view", ".", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as viewer:
        printed = [viewer.stdout.readline() for _ in range(2)]
        viewer.send_signal(signal.SIGINT)
    assert printed[0].startswith("0 runs: http://127.0.0.1:")
    assert printed[1].startswith("There are no runs yet in .: make one with `rllm demo`")


def read(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_run_in_the_runs_folder_is_shown_without_token_at_a_loopback_address(serve):
    address = serve("--host", "127.0.0.2")
    assert re.fullmatch(r"http://127\.0\.0\.2:\d+/run/one", address)
    assert "Reward" in read(address)


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], pytest.param(["--token", ""], marks=pytest.mark.slow)])
def test_other_addresses_need_a_token(serve, given):
    address = serve("--host", "0.0.0.0", *given)
    plain, _, token = address.partition("?token=")
    assert len(token) > 16
    with pytest.raises(urllib.error.HTTPError, match="401"):
        read(plain)
    with urllib.request.urlopen(urllib.request.Request(plain, headers={"authorization": f"Bearer {token}"})) as answer:
        assert answer.status == 200


def test_report_is_one_file_without_network_requests(tmp_path):
    large_run(tmp_path / "run", num_episodes=60)
    done = here("view", "run", "--export", "report.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "40 rollouts in full" in done.stdout
    html = (tmp_path / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    assert "<script" not in html
    assert all(f'id="{link}"' in html for link in re.findall(r'href="#([^"]+)"', html))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nix"], "run='nix': no such folder; there are no runs in "),
        ([], "or make one with `rllm demo`"),
        (["docs"], "run='docs' is not the folder of a run, nor a folder of runs"),
        (["docs", "docs", "--export", "x.html"], "--export takes one run, and 2 were named"),
        (["s3://bucket/run"], "'s3'"),
    ],
)
def test_invalid_input_prints_a_message(tmp_path, arguments, expected):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("")
    done = here("view", *arguments, cwd=tmp_path)
    assert (done.returncode, expected in done.stderr) == (2, True), done.stderr


def test_port_in_use_prints_a_message(tmp_path):
    large_run(tmp_path / "runs/one", num_episodes=4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = here("view", "--port", taken.getsockname()[1], cwd=tmp_path)
    assert (done.returncode, "another program listens there" in done.stderr) == (2, True), done.stderr
