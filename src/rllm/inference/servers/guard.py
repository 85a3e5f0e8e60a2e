"""Guard process between rllm and a server that it starts: ends the server when the starting process dies.

    python -I guard.py SCRATCH COMMAND...

It leads a process group of its own and reads a pipe that is never written to: the pipe ends when the starting
process does. The folder SCRATCH is then removed. This file imports nothing of rllm.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from types import FrameType

STOP_TIMEOUT_S = 20.0


class Stopped(Exception):
    """The server was asked to end."""


def main(scratch: str, command: list[str]) -> int:
    """Run the command until it ends or is stopped; return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()
    try:
        code = process.wait()
    except Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not end the guard before the server
        process.terminate()
        try:
            code = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
    # Processes that the server started may still be running.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    if code == -signal.SIGKILL:
        os.killpg(0, signal.SIGKILL)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _end_with_parent(scratch: str) -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held as the interpreter ends
        pass
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
