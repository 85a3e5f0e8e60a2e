"""Programs are started while other threads fork; each test is a separate program."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTS = """
import asyncio, os, threading
from pathlib import Path
import uvloop
from rllm.sdk import run_program
from rllm.sandbox.python import arun_python, run_python

held, holds = os.pipe()
done = threading.Event()


def fork_again_and_again():
    for _ in range(300):
        if done.is_set():
            break
        if not os.fork():
            os.close(holds)
            os.read(held, 1)  # until the parent ends
            os._exit(0)


from rllm.inference.servers.vllm_server import ServerProcess
def serve():
    ServerProcess(["true"], os.environ, Path(os.devnull)).stop()
async def users_own():
    await (await asyncio.create_subprocess_exec("true")).wait()


forking = threading.Thread(target=fork_again_and_again)
forking.start()
starts = 0
while forking.is_alive():
    {start}
    starts += 1
    if starts == 20:
        done.set()
forking.join()
print("started")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "run_program(['true'])",
        "run_python('')",
        "asyncio.run(arun_python(''))",
        pytest.param(
            "uvloop.run(users_own())",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="uvloop handles a fork twice, and Python exits"
            ),
        ),
        "serve()",
    ],
)
def test_program_is_started_while_other_threads_fork(start: str) -> None:
    silent = "ignore::DeprecationWarning"  # of Python 3.12 and newer, which warn about forks in processes with threads
    program = [sys.executable, "-W", silent, "-c", STARTS.format(start=start)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("started\n", "")
