from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rllm._runtime.supervisor import supervised

STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("is_asked", [True, False])
def test_program_is_ended_and_scratch_is_removed_only_with_its_owner(tmp_path: Path, is_asked: bool) -> None:
    written, scratch = tmp_path / "pid", tmp_path / "scratch"
    scratch.mkdir()
    ours, theirs = socket.socketpair()
    with theirs:
        command = supervised([sys.executable, "-c", STUBBORN, str(written)], theirs, grace_s=0.5, scratch=scratch)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    while not (written.exists() and written.read_text()):
        time.sleep(0.01)
    program = psutil.Process(int(written.read_text()))
    if is_asked:
        ours.send(b".")
    ours.close()  # without the byte, as if its owner had ended
    os.kill(process.pid, 15)  # a signal does not interrupt the shutdown
    process.wait(30)
    program.wait(30)
    assert scratch.exists() == is_asked


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_killed_supervisor_takes_its_program_with_it(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = supervised([sys.executable, "-c", STUBBORN, str(written)], theirs, grace_s=0.5)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        while not (written.exists() and written.read_text()):
            time.sleep(0.01)
        program = psutil.Process(int(written.read_text()))
        process.kill()
        process.wait(30)
        program.wait(30)
