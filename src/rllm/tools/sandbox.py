"""Run untrusted Python code in a process with limits: `run_python(code)`, or `await arun_python(code)`.

With Linux namespaces the code has:

- no network, no connection to a socket in the file system, no System V or POSIX memory that outlives it;
- no lock and no lease on a file, for which others would wait: inside, locks seem to succeed and lock nothing;
- no process of others to see, signal or trace, and no process of its own that outlives it;
- no capabilities, and no way to get some: no new privileges, no further namespaces, no mounts;
- an empty folder in memory (64 MiB, 10,000 names) to write to, and 16 MiB at `/dev/shm`; all other files are read-only,
  and the only devices are `null`, `zero`, `full`, `random` and `urandom`;
- limits on seconds, CPU seconds, address space of each process, open files, processes and output.

It does not protect from this: the code can read every file that this user can read, and open named pipes; up to 32
processes (300 for root, from Linux 6.14; before, root's are unlimited) have `memory_mb` each, and half as much again in
sockets and pipes; kernel vulnerabilities are not covered. Where that matters, run the whole program in a container or a
virtual machine, under a user id of its own.

`SandboxResult.missing` names features that the machine lacks, and a warning does so once. Without namespaces, code can
write wherever the user can, its processes can outlive it, and programs and signals are refused by Python alone, which
hostile code can undo; the network is blocked by a filter of system calls if the kernel has one
(`SandboxResult.network`). macOS has neither, and does not enforce the memory limit.

Any behaviour of the code is a result. `SandboxError` means that the sandbox could not be set up, which no code can
cause.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict, Unpack

from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError, RLLMError
from rllm.types import JSONObject

__all__ = ["SandboxError", "SandboxResult", "arun_python", "run_python"]

logger = logging.getLogger(__name__)

MIN_MEMORY_MB = 64
MAX_FILE_BYTES = 16 << 20
"""Of each file that the code writes, its output included."""
MAX_OPEN_FILES = 64
MAX_PROCESSES = 32
"""Threads count as processes."""
_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


class SandboxError(RLLMError):
    """A sandbox that could not be set up: the code has not run."""


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """Outcome of the code."""

    stdout: str
    """Its beginning, if it was `truncated`."""
    stderr: str
    """Its end, if it was `truncated`: that is where the traceback is."""
    exit_code: int
    """Negative: the number of the signal that ended it."""
    timed_out: bool = False
    """The code was killed at its deadline, or used up its CPU seconds."""
    truncated: bool = False
    network: str = "unknown"
    """`namespace`: the kernel gave it no network. `filter`: the kernel refuses the calls that need one. `blocked in
    python`: Python refuses it. `unknown`: the deadline came before the code began."""
    missing: tuple[str, ...] = ()
    """Protections that this machine does not provide: `processes`, `files`, `capabilities`, `calls`."""

    @property
    def ok(self) -> bool:
        """Return whether the code ran to its end."""
        return self.exit_code == 0 and not self.timed_out


class Limits(TypedDict, total=False):
    """Input and limits of one run."""

    stdin: str
    """Text on the standard input; empty by default."""
    timeout_s: float
    """Wall-clock seconds, 10 by default; at the deadline the process and its children are killed."""
    memory_mb: int
    """Mebibytes of address space of each process, 512 by default."""
    max_output_bytes: int
    """Limit of stdout and of stderr, 64,000 by default; the rest is dropped."""
    show_last_value: bool
    """Print the value of a last line that is an expression, as an interactive session does; off by default."""


def run_python(code: str, **limits: Unpack[Limits]) -> SandboxResult:
    """Run the code as a program of this interpreter, in an empty folder of its own, and wait for its end.

    Args:
        code: the source; it sees the installed packages, but neither this process nor its working directory.
        **limits: see `Limits`.

    Raises:
        ConfigError: if a limit makes no sense.
        SandboxError: if the sandbox could not be set up.
    """
    with _Run(code, **limits) as run:
        return run.result()


async def arun_python(code: str, **limits: Unpack[Limits]) -> SandboxResult:
    """Run the code beside the event loop, as `run_python` does; cancelling it kills the process."""
    run = _Run(code, **limits)

    def wait() -> SandboxResult:
        with run:
            return run.result()

    running = asyncio.ensure_future(in_thread(wait, name="sandbox"))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        run.kill()
        with suppress(Exception):
            await running  # until everything is removed
        raise


def run_judged(
    judge: str, judged: str, *, judged_stdin: str, **limits: Unpack[Limits]
) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs, each in a sandbox of its own, with a socket between them; both end when the first one does.

    The environment variable `_RLLM_CHANNEL` of each has the number of its end of the socket.

    Args:
        judge: the first program.
        judged: the second program.
        judged_stdin: standard input of the second.
        **limits: standard input of the first, and the limits of both.

    Returns:
        The outcomes of both.
    """
    judged_limits: Limits = {**limits, "stdin": judged_stdin}
    here, there = socket.socketpair()
    first = _Run(judge, channel=here, **limits)
    second = _Run(judged, channel=there, **judged_limits)
    with here, there, first, second:
        here.close()  # otherwise neither would see the other's end
        there.close()
        result = first.result()
        if not result.timed_out:
            second.await_code()  # otherwise a sandbox that could not be set up would look like a solution that ended
        second.kill()
        return result, second.result()


class _Run:
    """One run, as a context manager. `result` blocks; any thread may `kill` the run, even before it has begun."""

    def __init__(
        self,
        code: str,
        *,
        stdin: str = "",
        timeout_s: float = 10,
        memory_mb: int = 512,
        max_output_bytes: int = 64_000,
        show_last_value: bool = False,
        channel: socket.socket | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: use more than 0 seconds")
        if memory_mb < MIN_MEMORY_MB:
            raise ConfigError(f"memory_mb={memory_mb}: use at least {MIN_MEMORY_MB}, which Python itself needs")
        if max_output_bytes < 0:
            raise ConfigError(f"max_output_bytes={max_output_bytes}: use 0 or more")
        self._job: JSONObject = {
            "code": code,
            "show_last_value": show_last_value,
            "cpu_s": math.ceil(timeout_s),
            "memory_mb": memory_mb,
            "file_bytes": max(MAX_FILE_BYTES, 2 * max_output_bytes),
            "max_open_files": MAX_OPEN_FILES,
            "max_processes": MAX_PROCESSES,
        }
        self._stdin = stdin
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes
        self._channel = channel
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Run:
        """Start the process."""
        with ExitStack() as opened:
            try:
                folder = tempfile.mkdtemp(prefix="rllm-sandbox-")
                opened.callback(lambda: _remove(folder))
                # The files have no name, and a flood cannot grow them beyond their limit.
                stdin, job, self._stdout, self._stderr, self._report = (
                    opened.enter_context(_file_of(text))
                    for text in (self._stdin, json.dumps({**self._job, "folder": folder}), "", "", "")
                )
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                env = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads}
                files = [job.fileno(), self._report.fileno()]
                if self._channel is not None:
                    files.append(self._channel.fileno())
                    env["_RLLM_CHANNEL"] = str(files[-1])
                with self._lock, no_fork_meanwhile():
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-u", _CHILD, *map(str, files[:2])],
                        stdin=stdin,
                        stdout=self._stdout,
                        stderr=self._stderr,
                        pass_fds=files,
                        cwd=folder,
                        env=env,
                        start_new_session=True,
                    )
            except OSError as error:
                raise SandboxError(f"the sandbox could not be started: {error}") from error
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, and remove what it wrote."""
        assert self._process is not None
        self.kill()
        self._process.wait()
        self._opened.close()

    def kill(self) -> None:
        """End all processes of the run, unless it has ended."""
        with self._lock:
            if self._process is None:
                self._is_killed = True
            elif self._process.poll() is None:
                self._is_killed = True
                _kill_group(self._process.pid)

    def await_code(self) -> None:
        """Wait until the code begins, or cannot, for a few seconds at most."""
        assert self._process is not None
        end = time.monotonic() + 5
        while not _size(self._report) and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)

    def result(self) -> SandboxResult:
        """Wait for the end of the run, or end it at its deadline.

        Raises:
            SandboxError: if the code could not begin.
        """
        assert self._process is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self.kill()

        deadline = threading.Timer(self._timeout_s, expire)  # `wait(timeout_s)` would poll, and add up to 50 ms
        deadline.daemon = True
        deadline.start()
        if self._is_killed:  # before there was a process
            self.kill()
        exit_code = self._process.wait()
        deadline.cancel()
        _kill_group(self._process.pid)
        written = _read(self._report, 0, -1)  # before the code began: it has no way to write there
        if not written and not self._is_killed:
            reason = _read(self._stderr, 0, 4_000).strip().rpartition("\n")[2]
            raise SandboxError(f"the sandbox ended with exit code {exit_code} before the code began: {reason}")
        report: JSONObject = json.loads(written) if written else {"network": "unknown", "missing": []}
        missing, limit, stderr_size = tuple(report["missing"]), self._max_output_bytes, _size(self._stderr)
        _warn_of_weak_isolation(report["network"], missing)
        return SandboxResult(
            stdout=_read(self._stdout, 0, limit),
            stderr=_read(self._stderr, max(0, stderr_size - limit), limit),
            exit_code=exit_code,
            timed_out=expired.is_set() or exit_code == -signal.SIGXCPU,
            truncated=max(_size(self._stdout), stderr_size) > limit,
            network=report["network"],
            missing=missing,
        )


def _file_of(text: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _read(file: IO[bytes], start: int, max_bytes: int) -> str:
    file.seek(start)
    return file.read(max_bytes).decode(errors="replace")


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _remove(folder: str) -> None:
    """Remove a folder in which hostile code may have written: any depth, any names, any permissions.

    `chmod -R` and `rm -r` follow no links and have no limit on the depth, unlike `shutil.rmtree`.
    """
    with suppress(OSError):
        Path(folder).rmdir()  # with namespaces it is always empty: the code wrote to memory
        return
    with suppress(OSError):
        for command in ["chmod", "-R", "u+rwx"], ["rm", "-rf"]:
            with no_fork_meanwhile():
                process = subprocess.Popen(
                    [*command, "--", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            process.wait()
    if Path(folder).exists():
        logger.warning("the sandbox's folder %s could not be removed; remove it by hand", folder)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS reports a group that has just ended with the latter
        os.killpg(leader, signal.SIGKILL)


@functools.cache
def _warn_of_weak_isolation(network: str, missing: tuple[str, ...]) -> None:
    if network in ("filter", "blocked in python"):
        logger.warning(
            "this machine permits no namespaces: only Python keeps sandboxed code off %s, which hostile code can undo, "
            "and the code can write wherever this user can; allow user namespaces, or run in a container offline",
            "processes" if network == "filter" else "network and processes",
        )
    elif missing:
        logger.warning(
            "this machine lacks a part of the sandbox (%s), see rllm.tools.sandbox; run hostile code in a container",
            ", ".join(missing),
        )
