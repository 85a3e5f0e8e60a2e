"""What a command says that has done its work and cannot end yet."""

import subprocess
import sys

WAITS = """
import sys, threading
from rllm.cli.left_threads import tell_of_left_threads

threading.Thread(target=sys.stdin.readline, name="uploads").start()
tell_of_left_threads(0.0)
"""


def test_a_thread_that_is_waited_for_is_named():
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        output = process.communicate("go on\n", timeout=60)
    assert told.startswith(
        "rllm: the work is done; still running, and waited for: uploads. Threads that an agent starts should"
    )
    assert (process.returncode, output[1]) == (0, "")


def test_nothing_is_said_of_daemons():
    program = WAITS.replace("sys.stdin.readline", "threading.Event().wait").replace('name="uploads"', "daemon=True")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
