import asyncio
import os
import subprocess
import sys
from typing import IO, Any

import psutil
import pytest
import uvloop

from rllm.sandbox.base import SandboxError, Stream
from rllm.sandbox.client import OutputKeeper, ask, run_program


def test_output_keeps_both_ends_and_counts_the_rest():
    seen = []
    kept = OutputKeeper(10, lambda stream, data: seen.append(data))
    for piece in (b"abc", b"defgh", b"ijklmnop", b"q"):
        kept.add("stdout", piece)
    assert kept.text("stdout") == "abcde\n... 7 bytes omitted ...\nmnopq"
    assert kept.num_dropped_bytes == 7
    assert b"".join(seen) == b"abcdefghij"
    assert kept.text("stderr") == ""


def test_program_ends_with_the_event_loop(caplog):
    """The loop cancels all tasks at once, including those that end programs."""
    pids: list[int] = []

    async def main() -> None:
        begun = asyncio.Event()

        def add(_: Stream, data: bytes) -> None:
            pids.append(int(data))
            begun.set()

        program = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
        running = asyncio.create_task(run_program([sys.executable, "-S", "-c", program], add))
        await begun.wait()
        assert not running.done()

    asyncio.run(main())
    assert not psutil.pid_exists(*pids)
    assert not caplog.records


def test_programs_run_alike_under_uvloop():
    async def main():
        piped = await ask(["sh", "-c", "(yes; echo $? >&2) | head -n 1"])
        with pytest.raises(SandboxError, match="no-such-program cannot be started"):
            await ask(["no-such-program"])
        return piped.stdout, piped.stderr

    for loop_factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            assert runner.run(main()) == ("y\n", "141\n")


class Checked:
    """A pipe whose descriptor is still open when it is closed; a closed one's number may be another file's by then."""

    def __init__(self, pipe: IO[bytes], closed: list[int]) -> None:
        self.fileno, self._pipe, self._closed = pipe.fileno, pipe, closed

    def close(self) -> None:
        self._closed.append(os.fstat(self.fileno()).st_ino)
        self._pipe.close()


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_pipes_of_a_program_are_closed_once(loop_factory, monkeypatch):
    """Under uvloop a transport would close them before the file does, whose close then ends another thread's file."""
    closed: list[int] = []

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        process.stdout, process.stderr = (Checked(pipe, closed) for pipe in (process.stdout, process.stderr))
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        done = runner.run(ask(["sh", "-c", "echo 1; echo 2 >&2"]))
    assert (done.stdout, done.stderr) == ("1\n", "2\n")
    assert len(closed) == 2


async def test_program_that_ignores_termination_is_killed():
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    killed = []

    async def kill() -> None:
        killed.append(True)

    kept = OutputKeeper(10)
    ended = await run_program([sys.executable, "-S", "-c", program], kept.add, timeout_s=0.3, kill=kill)
    assert (ended.timed_out, ended.exit_code, killed) == (True, -9, [True])
