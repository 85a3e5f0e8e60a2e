"""Runner of Python code that is not trusted: `run_python(code)`, `await arun_python(code)`, and warm `Worker`s.

The code runs in bubblewrap, which needs Linux, as the sandboxes of the backend `local` do: read-only programs and
packages, files in memory, no network, no other processes, no capabilities. In addition, it has limits of its own and a
filter of system calls. Up to 32 processes may use `memory_mb` each, and half as much again in sockets and pipes.

If bubblewrap is missing, or may not make namespaces, the code has the same limits, except on processes, and its
process group is killed at its end. It can read and write whatever the user can. On Linux it has no capabilities, and
the filter refuses the network and signals. `SandboxResult.missing` names the gaps, and a warning does so once.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict, Unpack

from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError
from rllm.sandbox import bubblewrap, namespaces
from rllm.sandbox.base import ExecResult, SandboxError
from rllm.sandbox.call_filter import call_filter
from rllm.sandbox.client import with_signal
from rllm.sandbox.files import file_of
from rllm.sandbox.images import HOST
from rllm.types import JSONMapping, JSONObject

__all__ = ["PythonOptions", "SandboxError", "SandboxResult", "Worker", "arun_python", "run_judged", "run_python"]

logger = logging.getLogger(__name__)

MIN_MEMORY_MB = 64
MAX_FILE_BYTES = 16 << 20
"""Maximum size of each file that the code writes, its output included."""
MAX_PROCESSES = 32
"""Threads count as processes."""
_FOLDER, _FOLDER_BYTES = "/app", 64 << 20
_CHILD = str(Path(__file__).with_name("python_child.py"))
_PACKAGE = Path(__file__).parents[1]
_NO_LIMIT = _NO_FILTER = -1
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SandboxResult(ExecResult):
    """Outcome of the code: the beginning of its stdout, and the end of its stderr, where the traceback is."""

    network: str
    """`namespace`: the code had a network of its own, without connections. `filter`: the kernel refused sockets.
    `open`: nothing keeps it off the network."""
    missing: tuple[str, ...] = ()
    """Protections that this machine does not provide: `processes`, `files`, `capabilities`, `calls`."""

    @property
    def truncated(self) -> bool:
        """Return whether a part of the output was dropped."""
        return self.num_dropped_bytes > 0


class PythonOptions(TypedDict, total=False):
    """Input and limits of one run."""

    stdin: str
    """Text on the standard input; empty by default."""
    timeout_s: float
    """Wall-clock seconds, 10 by default; at the deadline the process and its children are killed. If the sandbox takes
    longer to start, its start is not counted."""
    memory_mb: int
    """Mebibytes of address space of each process, 512 by default."""
    max_output_bytes: int
    """Limit of stdout and of stderr, 64,000 by default; the rest is dropped."""
    show_last_value: bool
    """Print the value of a last line that is an expression, as an interactive session does; off by default."""


def run_python(code: str, **limits: Unpack[PythonOptions]) -> SandboxResult:
    """Run the code as a program of this interpreter, in an empty folder of its own, and wait for its end.

    Args:
        code: the source; it sees the installed packages, but neither this process nor its working directory.
        **limits: see `PythonOptions`.

    Raises:
        ConfigError: if a limit is out of range.
        SandboxError: if the sandbox could not be set up.
    """
    with _Run(code=code, **limits) as run:
        return run.result()


async def arun_python(code: str, **limits: Unpack[PythonOptions]) -> SandboxResult:
    """Run the code as `run_python` does, without blocking the event loop; cancelling it kills the process."""
    run = _Run(code=code, **limits)

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
    judge: str, judged: str, *, judged_stdin: str, **limits: Unpack[PythonOptions]
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
    judged_limits: PythonOptions = {**limits, "stdin": judged_stdin}
    here, there = socket.socketpair()
    first = _Run(code=judge, channel=here, **limits)
    second = _Run(code=judged, channel=there, **judged_limits)
    with here, there, first, second:
        here.close()  # otherwise neither would see the other's end
        there.close()
        result = first.result()
        if not result.timed_out:
            second.await_code()  # otherwise a sandbox that could not be set up would look like a solution that ended
        second.kill()
        return result, second.result()


class Worker:
    """Program that keeps running: it writes a line of JSON when it is ready, and then one for each line of its input.

    It ends when its input does. It is our own code, so only its memory is limited. One thread uses it at a time.
    """

    def __init__(self, code: str, *, packages: Path, memory_mb: int) -> None:
        """Start it, and wait until it is ready.

        Args:
            code: its source.
            packages: folder of packages that it imports, which may differ from the interpreter's.
            memory_mb: mebibytes of address space.

        Raises:
            SandboxError: if it ended before it was ready.
        """
        with _set_up() as opened:
            report, errors = (opened.enter_context(file_of("")) for _ in range(2))
            self._process = _start(
                code,
                opened,
                (subprocess.PIPE, subprocess.PIPE, errors),
                report,
                memory_mb=memory_mb,
                packages=packages,
                stays=True,
            )
            if self._reply() is None:
                raise SandboxError(f"the program ended before it was ready: {_last_line(errors)}")

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    def ask(self, request: JSONMapping) -> JSONObject | None:
        """Return its reply; `None` if it ended, as it may at a deadline of its own."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `_reply` finds out
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())
            self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> JSONObject | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.end()
            return None
        reply: JSONObject = json.loads(line)
        return reply

    def end(self) -> None:
        """End it."""
        _kill_group(self._process)
        with self._process, suppress(BrokenPipeError):  # closes the pipes and waits
            pass


@dataclass(kw_only=True)
class _Run:
    """One run, as a context manager. `result` blocks; any thread may `kill` the run, even before it has begun."""

    code: str
    stdin: str = ""
    timeout_s: float = 10
    memory_mb: int = 512
    max_output_bytes: int = 64_000
    show_last_value: bool = False
    channel: socket.socket | None = None

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: use a number of seconds above 0")
        if self.memory_mb < MIN_MEMORY_MB:
            raise ConfigError(f"memory_mb={self.memory_mb}: use at least {MIN_MEMORY_MB}, which Python itself needs")
        if self.max_output_bytes < 0:
            raise ConfigError(f"max_output_bytes={self.max_output_bytes}: use 0 or more")
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Run:
        """Start the process."""
        with _set_up() as opened:
            # The files have no name, and a flood cannot grow them beyond their limit.
            stdin, self._stdout, self._stderr, self._report = (
                opened.enter_context(file_of(text)) for text in (self.stdin, "", "", "")
            )
            with self._lock:
                self._process = _start(
                    self.code,
                    opened,
                    (stdin, self._stdout, self._stderr),
                    self._report,
                    memory_mb=self.memory_mb,
                    cpu_s=math.ceil(self.timeout_s),
                    file_bytes=max(MAX_FILE_BYTES, 2 * self.max_output_bytes),
                    show_last_value=self.show_last_value,
                    channel=self.channel,
                )
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
                _kill_group(self._process)

    def await_code(self) -> None:
        """Wait until the code begins, or cannot, for a minute at most."""
        assert self._process is not None
        end = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and not _size(self._report) and time.monotonic() < end:
            time.sleep(0.01)

    def result(self) -> SandboxResult:
        """Wait for the end of the run, or end it at its deadline.

        Raises:
            SandboxError: if the code could not begin.
        """
        assert self._process is not None
        ended, expired = threading.Event(), threading.Event()

        def expire() -> None:
            if not ended.is_set() and not _size(self._report):  # a slow start is not the code's
                self.await_code()
                ended.wait(self.timeout_s)
            if not ended.is_set():
                expired.set()
                self.kill()

        deadline = threading.Timer(self.timeout_s, expire)  # `wait(timeout_s)` would poll, and add up to 50 ms
        deadline.daemon = True
        deadline.start()
        if self._is_killed:  # before there was a process
            self.kill()
        exit_code = self._process.wait()
        ended.set()
        deadline.cancel()
        _kill_group(self._process)
        # Only the code that sets the sandbox up can write to the report.
        if not _size(self._report) and (expired.is_set() or not self._is_killed):
            reason = f"not in {_START_TIMEOUT_S:g} seconds" if expired.is_set() else _last_line(self._stderr)
            raise SandboxError(f"the sandbox ended with exit code {exit_code} before the code began: {reason}")
        is_confined, is_filtered = _is_confined(), call_filter(namespaced=True) is not None
        exit_code = with_signal(exit_code) if is_confined else exit_code
        lacks = {"processes": not is_confined, "files": not is_confined}
        lacks |= {"capabilities": not is_confined and not is_filtered, "calls": not is_filtered}
        limit, stdout_size, stderr_size = self.max_output_bytes, _size(self._stdout), _size(self._stderr)
        return SandboxResult(
            stdout=_read(self._stdout, 0, limit),
            stderr=_read(self._stderr, max(0, stderr_size - limit), limit),
            exit_code=exit_code,
            timed_out=expired.is_set() or exit_code == -signal.SIGXCPU,
            num_dropped_bytes=max(0, stdout_size - limit) + max(0, stderr_size - limit),
            network="namespace" if is_confined else "filter" if is_filtered else "open",
            missing=tuple(name for name, is_missing in lacks.items() if is_missing),
        )


@functools.cache
def _is_confined() -> bool:
    """Return whether this machine has bubblewrap that works; if not, log that once."""
    interpreter = (sys.executable, "-I", "-c", "import sys; open(sys.argv[1])", __file__)
    reason = bubblewrap.problem(interpreter) if sys.platform == "linux" else "this system has no bubblewrap"
    if reason:
        logger.warning(
            "%s: until then sandboxed code can read and write whatever this user can%s; or run in a container without "
            "network",
            reason,
            "" if call_filter(namespaced=False) else ", signal the user's processes, and reach the network",
        )
    return reason is None


@contextmanager
def _set_up() -> Iterator[ExitStack]:
    """Yield a stack for resources to close. Errors of the system are raised as `SandboxError`."""
    with ExitStack() as opened:
        try:
            yield opened
        except OSError as error:
            raise SandboxError(f"the sandbox could not be started: {error}") from error


def _start(
    code: str,
    opened: ExitStack,
    streams: tuple[IO[bytes] | int, IO[bytes] | int, IO[bytes]],
    report: IO[bytes],
    *,
    memory_mb: int,
    cpu_s: int = _NO_LIMIT,
    file_bytes: int = MAX_FILE_BYTES,
    show_last_value: bool = False,
    channel: socket.socket | None = None,
    packages: Path | None = None,
    stays: bool = False,
) -> subprocess.Popen[bytes]:
    """Start the code with limits. `opened` closes what is needed here, and removes what the code leaves.

    The code ends with the thread that starts it, unless it `stays`.
    """
    is_confined, folder = _is_confined(), tempfile.gettempdir() if stays else _FOLDER
    if not is_confined and not stays:
        folder = tempfile.mkdtemp(prefix="rllm-sandbox-")
        opened.callback(_remove, folder)
    source = opened.enter_context(file_of(code.encode(errors="surrogatepass")))
    rules = None if stays else call_filter(namespaced=is_confined)
    filter_file = opened.enter_context(file_of(rules)) if rules else None
    files = [file.fileno() for file in (source, report, filter_file, channel) if file]
    filter_fd = filter_file.fileno() if filter_file else _NO_FILTER
    arguments = [*files[:2], _NO_FILTER if is_confined else filter_fd, int(show_last_value)]
    arguments += [cpu_s, memory_mb << 20, file_bytes, MAX_PROCESSES if is_confined else _NO_LIMIT]
    command = [sys.executable, "-I", "-u", _CHILD, *map(str, arguments), *([str(packages)] if packages else [])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads}
    if channel is not None:
        env["_RLLM_CHANNEL"] = str(channel.fileno())
    if is_confined:
        mounts = {str(path): path for path in (_PACKAGE, packages) if path}
        job, start = bubblewrap.start_job(HOST, mounts, file_bytes=_FOLDER_BYTES)
        start += [] if stays else ["--die-with-parent"]
        start += ["--seccomp", str(filter_fd)] if rules else []
        start += [text for name, value in env.items() for text in ("--setenv", name, value)]
        job["pass_fds"] = files
        job["init"] = ["--dir", folder, "--chdir", folder, "--", *command]
        command = namespaces.arguments(job, start)
    with no_fork_meanwhile():
        return subprocess.Popen(
            command,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=files,
            cwd="/" if is_confined else folder,
            env={} if is_confined else env,
            start_new_session=not stays,
            process_group=0 if stays else None,
        )


def _read(file: IO[bytes], start: int, max_bytes: int) -> str:
    file.seek(start)
    return file.read(max_bytes).decode(errors="replace")


def _last_line(file: IO[bytes]) -> str:
    return _read(file, 0, 4_000).strip().rpartition("\n")[2]


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _remove(folder: str) -> None:
    """Remove a folder in which hostile code may have written: any depth, any names, any permissions.

    `chmod -R` and `rm -r` follow no links and have no limit on the depth, unlike `shutil.rmtree`.
    """
    with suppress(OSError):
        for command in ["chmod", "-R", "u+rwx"], ["rm", "-rf"]:
            with no_fork_meanwhile():
                process = subprocess.Popen(
                    [*command, "--", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            process.wait()
    if Path(folder).exists():
        logger.warning("the sandbox's folder %s could not be removed; remove it by hand", folder)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS reports a group that has just ended with the latter
        os.killpg(process.pid, signal.SIGKILL)
