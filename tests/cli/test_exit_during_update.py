"""The end of a command while an abandoned update is still running in a thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from rllm import cli
from rllm._runtime.threads import BACKEND_THREAD


def run():
    threading.Thread(target=time.sleep, args=(60,), name=sys.argv[1] or BACKEND_THREAD, daemon=True).start()
    print("Stopped.")
    sys.exit(130)


cli._run = run
atexit.register(print, "Python ends.")
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("thread", "printed"), [("", "Stopped.\n"), ("an agent's", "Stopped.\nPython ends.\n")])
def test_update_finishes_before_python_exits(thread, printed):
    command = [sys.executable, "-c", PROGRAM, thread]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, printed, "")
