"""The commands of docs/viewer.md, run as they stand but for the port."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..viewer.made import large_run

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "viewer.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_works(tmp_path, line):
    large_run(tmp_path / "runs/demo", num_episodes=4)
    command = [sys.executable, "-m", *shlex.split(line.replace("$TOKEN", "secret"))]
    serves = "--export" not in line
    viewer = subprocess.Popen(
        [*command, *(["--port", "0"] if serves else [])],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    told = viewer.stdout.readline()
    if serves:
        assert "http://127.0.0.1:" in told
        viewer.send_signal(signal.SIGINT)
    else:
        assert (tmp_path / "report.html").exists()
    assert viewer.wait(60) == 0
    viewer.stdout.close()


@pytest.mark.parametrize("picture", re.findall(r"\]\((\S+\.png)\)", TEXT))
def test_every_picture_is_there_and_small(picture):
    assert 0 < (DOCS / picture).stat().st_size < 120_000
