from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

GUARD = "import sys; from rllm.inference.servers import guard; guard.STOP_TIMEOUT_S = 0.5; sys.exit(guard.main('', sys.argv[1:]))"
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def test_second_signal_does_not_interrupt_the_shutdown(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    command = [sys.executable, "-c", GUARD, sys.executable, "-c", STUBBORN, str(written)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    while not (written.exists() and written.read_text()):
        time.sleep(0.01)
    server = psutil.Process(int(written.read_text()))
    guard.terminate()
    time.sleep(0.1)
    assert guard.stdin is not None
    guard.stdin.close()  # also if its parent has ended
    guard.wait(30)
    server.wait(30)
