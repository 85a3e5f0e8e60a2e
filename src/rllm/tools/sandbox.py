"""Run Python code that nobody has read, in a process with limits: `run_python(code)`, or `await arun_python(code)`.

What it protects from: endless loops and sleeps, memory and output floods, fork bombs (but see below), processes left behind,
signals to other processes, secrets in the parent's environment, and the network.

What it does not protect from: the code reads every file that this user may read and writes wherever this user may write;
it can reach services that listen on a Unix socket in the file system; it can fill the disk with many files; the kernel does
not bound the number of root's processes, nor the memory of several processes together. Where the kernel permits no namespaces
(`SandboxResult.network` says so), network, programs and signals are refused by Python alone, which hostile code can undo, and
the parent's environment can be read through `/proc`. Against
hostile code rather than careless code, run the whole program in a container or a virtual machine. macOS has no
namespaces and does not enforce the memory limit.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rllm.errors import ConfigError
from rllm.forks import no_fork_meanwhile
from rllm.threads import in_thread

__all__ = ["SandboxResult", "arun_python", "run_python"]

logger = logging.getLogger(__name__)

MIN_MEMORY_MB = 64
MAX_FILE_BYTES = 16 << 20
"""Of each file that the code writes, its output included."""
MAX_OPEN_FILES = 64
MAX_PROCESSES = 32
"""Threads count as processes."""
_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What came of the code."""

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
    """`namespace`: the kernel gave it no network. `blocked in python`: Python refused it. `unknown`: it ended too soon."""

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end."""
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
        stdin: what the code can read from its standard input.
        timeout_s: wall-clock seconds; at the deadline the process and its children are killed.
        cpu_s: CPU seconds of each process; by default as many as `timeout_s`.
        memory_mb: mebibytes of address space of each process.
        max_output_bytes: of stdout and of stderr; the rest is dropped.
        show_last_value: print the value of a last line that is an expression, as an interactive session does.

    Raises:
        ConfigError: if a limit makes no sense.
    """
    job = _job(code, timeout_s, cpu_s, memory_mb, max_output_bytes, show_last_value)
    with _files(job, stdin) as files:
        process = _started(files)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill_group(process.pid)

        deadline = threading.Timer(timeout_s, expire)  # `wait(timeout_s)` would poll, and add up to 50 ms
        try:
            deadline.start()
            process.wait()
        finally:
            deadline.cancel()
            _kill_group(process.pid)
            exit_code = process.wait()
        return files.result(exit_code, expired.is_set(), max_output_bytes)


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
    with _files(job, stdin) as files:
        process = _started(files)
        try:
            await asyncio.wait_for(in_thread(process.wait, name="sandbox"), timeout_s)
            timed_out = False
        except TimeoutError:
            timed_out = True
        finally:
            _kill_group(process.pid)
            exit_code = await in_thread(process.wait, name="sandbox")
        return files.result(exit_code, timed_out, max_output_bytes)


def _started(files: _Files) -> subprocess.Popen[bytes]:
    with no_fork_meanwhile():
        return subprocess.Popen(files.command, **files.popen_options)


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
    """What passes between the two processes: files without a name, which a flood cannot grow beyond their limit."""

    folder: str
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    job: IO[bytes]
    report: IO[bytes]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-I", "-u", _CHILD, str(self.job.fileno()), str(self.report.fileno())]

    @property
    def popen_options(self) -> dict[str, Any]:
        return {
            "stdin": self.stdin,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "pass_fds": (self.job.fileno(), self.report.fileno()),
            "cwd": self.folder,
            "env": _environment(self.folder),
            "start_new_session": True,
        }

    def result(self, exit_code: int, timed_out: bool, max_output_bytes: int) -> SandboxResult:
        self.report.seek(0)
        network = self.report.read().decode() or "unknown"
        if network == "blocked in python":
            _warn_of_weak_isolation()
        sizes = [os.fstat(file.fileno()).st_size for file in (self.stdout, self.stderr)]
        return SandboxResult(
            stdout=_read(self.stdout, 0, max_output_bytes),
            stderr=_read(self.stderr, max(0, sizes[1] - max_output_bytes), max_output_bytes),
            exit_code=exit_code,
            timed_out=timed_out or exit_code == -signal.SIGXCPU,
            truncated=max(sizes) > max_output_bytes,
            network=network,
        )


@contextmanager
def _files(job: dict[str, Any], stdin: str) -> Iterator[_Files]:
    with (
        tempfile.TemporaryDirectory(prefix="rllm-sandbox-", ignore_cleanup_errors=True) as folder,
        _file_of(stdin.encode(errors="replace")) as input_file,
        _file_of(b"") as stdout,
        _file_of(b"") as stderr,
        _file_of(json.dumps(job).encode()) as job_file,
        _file_of(b"") as report,
    ):
        yield _Files(folder=folder, stdin=input_file, stdout=stdout, stderr=stderr, job=job_file, report=report)


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
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has only just ended
        os.killpg(leader, signal.SIGKILL)


@functools.cache
def _warn_of_weak_isolation() -> None:
    logger.warning(
        "this machine permits no namespaces: sandboxed code is kept off network and processes by Python alone, "
        "which hostile code can undo; allow user namespaces, or run in a container without network"
    )
