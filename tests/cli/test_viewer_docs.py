"""The commands of docs/viewer.md, run unchanged except for the port."""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ..viewer.run_folders import large_run

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "viewer.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.mark.docs
@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_work(tmp_path, line):
    large_run(tmp_path / "runs/first", num_episodes=4)
    serves = "--export" not in line
    command = [
        sys.executable,
        "-m",
        *shlex.split(line.replace("$TOKEN", "secret")),
        *(["--port", "0"] if serves else []),
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as viewer:
        printed = viewer.stdout.readline()
        if serves:
            address = re.search(r"http://\S+", printed)[0]
            with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(address, timeout=60) as answer:
                assert "Reward" in answer.read().decode()
            viewer.send_signal(signal.SIGINT)
        else:
            assert (tmp_path / "report.html").exists()
        assert viewer.wait(60) == 0


@pytest.mark.parametrize("picture", re.findall(r"\]\((\S+\.png)\)", TEXT))
def test_every_picture_exists_and_is_small(picture):
    assert 0 < (DOCS / picture).stat().st_size < 120_000
