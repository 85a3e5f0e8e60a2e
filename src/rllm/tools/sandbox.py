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
import errno
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError, RLLMError

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
    """It was cut at its deadline, or used up its CPU seconds."""
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


def run_python(
    code: str,
    *,
    stdin: str = "",
    timeout_s: float = 10,
    cpu_s: float | None = None,
    memory_mb: int = 512,
    max_output_bytes: int = 64_000,
    show_last_value: bool = False,
) -> SandboxResult:
    """Run the code as a program of this interpreter, in an empty folder of its own, and wait for its end.

    Args:
        code: the source; it sees the installed packages, but neither this process nor its working directory.
        stdin: text on its standard input.
        timeout_s: wall-clock seconds; at the deadline the process and its children are killed.
        cpu_s: CPU seconds of each process; by default as many as `timeout_s`.
        memory_mb: mebibytes of address space of each process.
        max_output_bytes: of stdout and of stderr; the rest is dropped.
        show_last_value: print the value of a last line that is an expression, as an interactive session does.

    Raises:
        ConfigError: if a limit makes no sense.
        SandboxError: if the sandbox could not be set up.
    """
    job = _job(code, timeout_s, cpu_s, memory_mb, max_output_bytes, show_last_value)
    return _Run(job, stdin, timeout_s, max_output_bytes).whole()


async def arun_python(
    code: str,
    *,
    stdin: str = "",
    timeout_s: float = 10,
    cpu_s: float | None = None,
    memory_mb: int = 512,
    max_output_bytes: int = 64_000,
    show_last_value: bool = False,
) -> SandboxResult:
    """`run_python` beside the event loop; cancelling it kills the process."""
    job = _job(code, timeout_s, cpu_s, memory_mb, max_output_bytes, show_last_value)
    run = _Run(job, stdin, timeout_s, max_output_bytes)
    running = asyncio.ensure_future(in_thread(run.whole, name="sandbox"))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        run.kill()
        with suppress(Exception):
            await running  # until everything is removed
        raise


def run_judged(
    judge: str, judged: str, *, stdin: str, judged_stdin: str, timeout_s: float, memory_mb: int, max_output_bytes: int
) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs, each in a sandbox of its own, with a socket between them; both end when the first one does.

    The environment variable `_RLLM_CHANNEL` of each has the number of its end of the socket.

    Args:
        judge: the first program.
        judged: the second program.
        stdin: standard input of the first.
        judged_stdin: standard input of the second.

    Returns:
        The outcomes of both.
    """
    job = _job(judge, timeout_s, None, memory_mb, max_output_bytes, show_last_value=False)
    here, there = socket.socketpair()
    first = _Run(job, stdin, timeout_s, max_output_bytes, here)
    second = _Run({**job, "code": judged}, judged_stdin, timeout_s, max_output_bytes, there)
    with here, there, first.started(), second.started():
        here.close()  # else neither would see the other's end
        there.close()
        result = first.result()
        if not result.timed_out:
            second.await_code()  # else a sandbox that could not be set up would look like a solution that ended
        second.kill()
        return result, second.result()


class _Run:
    """One run of a job. `result` blocks; any thread may `kill` the run, even before it has begun."""

    def __init__(
        self,
        job: dict[str, Any],
        stdin: str,
        timeout_s: float,
        max_output_bytes: int,
        channel: socket.socket | None = None,
    ) -> None:
        self._job = job
        self._stdin = stdin
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes
        self._channel = channel
        self._lock = threading.Lock()
        self._files: _Files
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def whole(self) -> SandboxResult:
        """Start it, and wait for its end."""
        with self.started():
            return self.result()

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start it; end it and remove what it wrote on exit."""
        with ExitStack() as opened:
            try:
                self._files = opened.enter_context(_files(self._job, self._stdin, self._channel))
                with self._lock, no_fork_meanwhile():
                    self._process = subprocess.Popen(self._files.command, **self._files.popen_options)
            except OSError as error:
                raise SandboxError(f"the sandbox could not be started: {error}") from error
            try:
                yield
            finally:
                self.kill()
                self._process.wait()

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
        while not self._files.report_size and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)

    def result(self) -> SandboxResult:
        """Wait for its end, or end it at its deadline.

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
        self._process.wait()
        deadline.cancel()
        _kill_group(self._process.pid)
        return self._files.result(
            self._process.returncode, expired.is_set(), self._max_output_bytes, may_be_early=self._is_killed
        )


def _job(
    code: str, timeout_s: float, cpu_s: float | None, memory_mb: int, max_output_bytes: int, show_last_value: bool
) -> dict[str, Any]:
    cpu_s = timeout_s if cpu_s is None else cpu_s
    if not (timeout_s > 0 and cpu_s > 0):
        raise ConfigError(f"timeout_s={timeout_s}, cpu_s={cpu_s}: the code needs more than 0 seconds")
    if memory_mb < MIN_MEMORY_MB:
        raise ConfigError(f"memory_mb={memory_mb}: Python itself needs {MIN_MEMORY_MB}")
    if max_output_bytes < 0:
        raise ConfigError(f"max_output_bytes={max_output_bytes}: it must be 0 or more")
    return {
        "code": code,
        "show_last_value": show_last_value,
        "cpu_s": math.ceil(cpu_s),
        "memory_mb": memory_mb,
        "file_bytes": max(MAX_FILE_BYTES, 2 * max_output_bytes),
        "max_open_files": MAX_OPEN_FILES,
        "max_processes": MAX_PROCESSES,
    }


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Files between the two processes. They have no name, and a flood cannot grow them beyond their limit."""

    folder: str
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    job: IO[bytes]
    report: IO[bytes]
    channel: socket.socket | None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-I", "-u", _CHILD, str(self.job.fileno()), str(self.report.fileno())]

    @property
    def popen_options(self) -> dict[str, Any]:
        channel = [] if self.channel is None else [self.channel.fileno()]
        return {
            "stdin": self.stdin,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "pass_fds": (self.job.fileno(), self.report.fileno(), *channel),
            "cwd": self.folder,
            "env": {**_environment(self.folder), **({"_RLLM_CHANNEL": str(channel[0])} if channel else {})},
            "start_new_session": True,
        }

    @property
    def report_size(self) -> int:
        return os.fstat(self.report.fileno()).st_size

    def result(self, exit_code: int, timed_out: bool, max_output_bytes: int, *, may_be_early: bool) -> SandboxResult:
        self.report.seek(0)
        written = self.report.read()  # before the code began: it has no way to write there
        if not written and not may_be_early:
            reason = _read(self.stderr, 0, 4_000).strip().rpartition("\n")[2]
            raise SandboxError(f"the sandbox ended with exit code {exit_code} before the code began: {reason}")
        report: dict[str, Any] = json.loads(written) if written else {"network": "unknown", "missing": []}
        _warn_of_weak_isolation(report["network"], tuple(report["missing"]))
        sizes = [os.fstat(file.fileno()).st_size for file in (self.stdout, self.stderr)]
        return SandboxResult(
            stdout=_read(self.stdout, 0, max_output_bytes),
            stderr=_read(self.stderr, max(0, sizes[1] - max_output_bytes), max_output_bytes),
            exit_code=exit_code,
            timed_out=timed_out or exit_code == -signal.SIGXCPU,
            truncated=max(sizes) > max_output_bytes,
            network=report["network"],
            missing=tuple(report["missing"]),
        )


@contextmanager
def _files(job: dict[str, Any], stdin: str, channel: socket.socket | None) -> Iterator[_Files]:
    with ExitStack() as opened:
        folder = tempfile.mkdtemp(prefix="rllm-sandbox-")
        opened.callback(_remove, folder)
        contents = {
            "stdin": stdin,
            "stdout": "",
            "stderr": "",
            "job": json.dumps({**job, "folder": folder}),
            "report": "",
        }
        files = {name: opened.enter_context(_file_of(text.encode(errors="replace"))) for name, text in contents.items()}
        yield _Files(folder=folder, channel=channel, **files)


def _remove(folder: str) -> None:
    """Remove a folder in which hostile code may have written: any depth, any names, any permissions.

    One folder is open at a time, and no path is longer than a name. Links are removed, not followed.
    """
    try:
        with suppress(OSError):
            Path(folder).rmdir()  # with namespaces it is always empty: the code wrote to memory
            return
        _empty(os.open(folder, _FOLDER))
        Path(folder).rmdir()
    except OSError as error:
        logger.warning("a folder of the sandbox remains: %s", error)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _empty(folder: int) -> None:
    """Remove all that is in the open folder, and close it."""
    above: list[tuple[os.stat_result, list[str]]] = []
    """For each folder on the way to the open one: its identity, and its folders that remain, the one on the way
    last."""
    remaining = _folders_left(folder)
    try:
        while remaining or above:
            if remaining:
                above.append((os.fstat(folder), remaining))
                folder = _moved(folder, remaining[-1])
                remaining = _folders_left(folder)
                continue
            identity, remaining = above.pop()
            folder = _moved(folder, "..")
            if not os.path.samestat(os.fstat(folder), identity):  # a process that got away has moved it
                raise OSError(errno.ESTALE, "a folder was moved while it was emptied")
            os.rmdir(remaining.pop(), dir_fd=folder)
    finally:
        os.close(folder)


def _moved(folder: int, name: str) -> int:
    """Return the folder of that name, open, and close this one."""
    opened = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return opened


def _folders_left(folder: int) -> list[str]:
    """Remove everything but the folders in the open one, and permit everything with these."""
    folders = []
    os.fchmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def _file_of(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _read(file: IO[bytes], start: int, max_bytes: int) -> str:
    file.seek(start)
    return file.read(max_bytes).decode(errors="replace")


def _environment(folder: str) -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **one_thread}


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS reports a group that has just ended with the latter
        os.killpg(leader, signal.SIGKILL)


@functools.cache
def _warn_of_weak_isolation(network: str, missing: tuple[str, ...]) -> None:
    if network in ("filter", "blocked in python"):
        logger.warning(
            "this machine permits no namespaces: sandboxed code is kept off %s by Python alone, which hostile code can "
            "undo, and writes wherever this user may; allow user namespaces, or run in a container without network",
            "processes" if network == "filter" else "network and processes",
        )
    elif missing:
        logger.warning(
            "this machine does not provide a part of the sandbox (%s), see rllm.tools.sandbox: run in a container if "
            "the code is hostile",
            ", ".join(missing),
        )
