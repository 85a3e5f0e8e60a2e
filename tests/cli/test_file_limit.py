"""Limits on files and connections of a command; limits belong to a process, so each test has its own."""

import subprocess
import sys

import pytest

from rllm.cli import _TOO_MANY_FILES, MAX_OPEN_FILES

resource = pytest.importorskip("resource")

PROGRAM = """
import resource
from rllm.cli import _raise_file_limit

for soft in (100, 2000):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, 2000))
    _raise_file_limit()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
WITH_NONE_LEFT = """
import os, resource, sys
from rllm import cli

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
sys.argv = ["rllm", "export", "run", "--episodes", "episodes.jsonl"]
import rllm.trainer.export, rllm.trainer.episode_records
kept = []
try:
    while True:
        kept.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    cli.main()
"""
GRANTED = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.skipif(0 <= GRANTED < 2000, reason="the system grants too few open files")
def test_file_limit_is_raised_to_the_maximum():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2000 2000\n" * 2
    assert MAX_OPEN_FILES >= 2000


@pytest.mark.slow
def test_file_limit_error_names_the_remedy(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("num_steps: 1\n")
    (tmp_path / "run" / "traces.db").touch()
    command = [sys.executable, "-c", WITH_NONE_LEFT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"rllm: {_TOO_MANY_FILES}\n")
