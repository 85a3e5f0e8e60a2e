"""What a command says that has done its work and cannot end yet."""

import subprocess
import sys

import pytest

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


GIVEN_UP = """
import atexit, sys, threading, time
from rllm import cli
from rllm._runtime.threads import BACKEND_THREAD


def run():
    threading.Thread(target=time.sleep, args=(60,), name=sys.argv[1] or BACKEND_THREAD, daemon=True).start()
    print("Stopped.")
    sys.exit(130)


cli._run = run
atexit.register(print, "Python takes down what is left.")
cli.main()
"""


@pytest.mark.parametrize(
    ("thread", "told"), [("", "Stopped.\n"), ("an agent's", "Stopped.\nPython takes down what is left.\n")]
)
def test_an_update_that_was_given_up_is_not_taken_down_by_python(thread, told):
    command = [sys.executable, "-c", GIVEN_UP, thread]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, told, "")
