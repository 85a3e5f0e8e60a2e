"""Forks that users' code makes; each test is a program of its own, which a fork cannot spoil for others."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, sys, warnings
from rllm.errors import AgentError, boundary
from rllm._runtime.threads import in_thread

warnings.simplefilter("ignore", DeprecationWarning)  # of forks among threads


def fork():
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("child", flush=True)
    {ending}


async def in_the_loop():
    with boundary(AgentError, "agent"):
        return fork()


print("thread", asyncio.run(in_thread(fork, name="agent")))
print("loop", asyncio.run(in_the_loop()))
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("return 0", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "SystemExit: no"),
        ("os.execvp('no-such-program', ['x'])", 1, "FileNotFoundError: [Errno 2] No such file or directory"),
    ],
)
def test_a_fork_ends_where_the_code_does_that_made_it(ending: str, code: int, said: str) -> None:
    program = [sys.executable, "-u", "-c", PROGRAM.format(ending=ending)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["child", f"thread {code}", "child", f"loop {code}"]
    told = [line for line in done.stderr.splitlines() if line.startswith(("SystemExit", "FileNotFoundError"))]
    assert (done.returncode, told) == (0, [said] * 2 if said else [])


STARTS = """
import asyncio, os, threading
from pathlib import Path
import uvloop
from rllm.sdk import run_program
from rllm.tools.sandbox import arun_python, run_python

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


from rllm.inference.servers.process import ServerProcess
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


@pytest.mark.parametrize(
    "start",
    [
        "run_program(['true'])",
        "run_python('')",
        "asyncio.run(arun_python(''))",
        pytest.param(
            "uvloop.run(users_own())",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="uvloop tells a fork twice, and Python ends it"
            ),
        ),
        "serve()",
    ],
)
def test_a_program_is_started_while_other_threads_fork(start: str) -> None:
    silent = (
        "ignore::DeprecationWarning"  # of Python 3.12 and newer, which tell whoever forks beside threads of the dangers
    )
    program = [sys.executable, "-W", silent, "-c", STARTS.format(start=start)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("started\n", "")
