"""Run another program as part of an agent: its model calls belong to the session that it is started in.

async def agent(task: str) -> float:
    done = await run_program_async(["claude", "-p", task], timeout_s=600)
    return grade(done.stdout)

`_runtime/supervisor.py` runs as a process between this one and the program, and ends all that the program started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal, TypeAlias, TypedDict, Unpack

from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.supervisor import supervised
from rllm._runtime.threads import in_thread
from rllm._runtime.untrusted import HeadAndTail
from rllm.errors import ConfigError, RLLMError
from rllm.sandbox.base import ExecResult
from rllm.sdk.context import current_frame, has_outlived_rollout
from rllm.sdk.propagation import program_environment
from rllm.sdk.variables import without_operators_keys

_POLL_S = 0.25
_DRAIN_S = 1.0
"""Seconds to keep reading a pipe held open by a process that could not be killed."""

Argument: TypeAlias = str | os.PathLike[str]
Stream: TypeAlias = Literal["stdout", "stderr"]


class ProgramOptions(TypedDict, total=False):
    """Options of `run_program`, all of which have defaults."""

    timeout_s: float | None
    """Seconds after which it is killed; `None`, the default, leaves that to the rollout's own time limit."""
    max_output_bytes: int
    """Limit on its stdout, and on its stderr: half is kept from the beginning, half from the end."""
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    cwd: Argument | None
    """Working directory; by default the current one."""
    env: Mapping[str, Argument] | None
    """More variables, which override this process's and the session's."""
    input: str
    """Its stdin."""


def run_program(command: Sequence[Argument], **options: Unpack[ProgramOptions]) -> ProgramResult:
    """Run a program with the environment of the current session, and end all its processes when it ends.

    Its clients find the session's gateway by `rllm.sdk.environment()`; outside of a rollout the environment is
    unchanged. A program that outlives its rollout is ended, with everything it started. Async code uses
    `run_program_async`.

    Args:
        command: the program and its arguments, without a shell.
        options: see `ProgramOptions`.

    Raises:
        ConfigError: if it cannot be started.
        RLLMError: if the rollout of this thread or task has ended.
    """
    return _prepared(command, **options)(lambda: False)


async def run_program_async(command: Sequence[Argument], **options: Unpack[ProgramOptions]) -> ProgramResult:
    """Run a program without blocking the event loop; cancelling ends it. See `run_program`.

    Raises:
        ConfigError: if it cannot be started.
        RLLMError: if the rollout of this thread or task has ended.
    """
    cancelled = threading.Event()
    run = _prepared(command, **options)
    try:
        return await in_thread(partial(run, cancelled.is_set), name=f"program {_program(command)}")
    except asyncio.CancelledError:
        cancelled.set()
        raise


def _prepared(
    command: Sequence[Argument],
    *,
    timeout_s: float | None = None,
    max_output_bytes: int = 1_000_000,
    grace_s: float = 5.0,
    cwd: Argument | None = None,
    env: Mapping[str, Argument] | None = None,
    input: str = "",
) -> Callable[[Callable[[], bool]], ProgramResult]:
    """Return a function that runs the program in the current session, until its argument returns True."""
    if has_outlived_rollout():
        raise RLLMError(
            f"{_program(command)!r} cannot be started: the rollout of this thread or task has ended, and all its "
            "programs with it"
        )
    limits = ProgramLimits(timeout_s=timeout_s, max_output_bytes=max_output_bytes, grace_s=grace_s)
    frame = current_frame()
    variables = dict(os.environ)
    if frame is not None:
        frame.note("programs", _program(command))
        if led := program_environment(frame):
            variables = {**without_operators_keys(variables), **led}
    given = {**variables, **(env or {})}

    def run(is_cancelled: Callable[[], bool]) -> ProgramResult:
        def is_wanted() -> bool:
            # All sessions around, since an abandoned thread may hold inner ones open.
            return not is_cancelled() and all(entered.session.is_open for entered in frame or ())

        return run_supervised(command, limits, env=given, cwd=cwd, stdin=input, is_wanted=is_wanted)

    return run


def _program(command: Sequence[Argument]) -> str:
    """Return the program's name; empty for an empty command, which is refused later."""
    return str(command[0]) if command else ""


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Limits of a program; the fields are options of `rllm run`."""

    timeout_s: float | None = None
    """Seconds after which the program is killed; no limit by default."""
    max_output_bytes: int = 1_000_000
    """Bytes of the program's stdout, and of its stderr, to pass on and keep."""
    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: use a number of seconds above 0, or None")
        if not self.max_output_bytes >= 0:
            raise ConfigError(f"max_output_bytes={self.max_output_bytes!r}: use 0 or more")
        if not self.grace_s >= 0:
            raise ConfigError(f"grace_s={self.grace_s!r}: use 0 or more seconds")


@dataclass(frozen=True, kw_only=True)
class ProgramResult(ExecResult):
    """Result of a program."""

    num_killed: int = 0
    """Number of its processes that were still running at the end and had to be ended."""


def run_supervised(
    command: Sequence[Argument],
    limits: ProgramLimits,
    *,
    env: Mapping[str, Argument],
    cwd: Argument | None = None,
    stdin: str | int = "",
    on_output: Callable[[Stream, bytes], None] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> ProgramResult:
    """Run a program until it ends, exceeds its time limit or `is_wanted` returns False; then kill all its processes.

    On Linux that is every process, daemons included, even if this process is killed; elsewhere it is the process group.

    Args:
        command: the program and its arguments, without a shell.
        limits: time, output and grace period.
        env: its whole environment.
        cwd: working directory; by default the current one.
        stdin: its input, or a file descriptor.
        on_output: called at once with the beginning of its output, and with the rest when it has ended.
        is_wanted: called four times a second; False ends the program.

    Raises:
        ConfigError: if it cannot be started.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command={command!r}: use a list of a program and its arguments")
    if cwd is not None and not Path(cwd).is_dir():
        raise ConfigError(f"cwd={os.fspath(cwd)!r}: no such folder")
    program = str(command[0])
    arguments = [_text(item, f"argument {number} of {program!r}") for number, item in enumerate(command)]
    variables = {name: _text(value, f"the variable {name} of {program!r}") for name, value in env.items()}
    if cwd is not None:
        variables["PWD"] = str(Path(cwd).absolute())  # as a shell does
    with contextlib.ExitStack() as opened:
        source: IO[bytes] | int = stdin if isinstance(stdin, int) else subprocess.DEVNULL
        if isinstance(stdin, str) and stdin:
            source = opened.enter_context(tempfile.TemporaryFile())
            source.write(stdin.encode())
            source.seek(0)
        with _startable(program), no_fork_meanwhile():
            ours, theirs = socket.socketpair()
            opened.enter_context(ours)
            with theirs:
                process = Context().run(  # outside of any session, which would change its environment
                    subprocess.Popen,
                    supervised(arguments, theirs, grace_s=limits.grace_s),
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=cwd,
                    env=variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        with process:
            return _Watch(process, ours, limits, on_output, is_wanted).result(program)


def _text(given: object, what: str) -> str:
    """Return an argument or a variable as text; `what` names it in errors."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ConfigError(f"{what} is {given!r}: use text or a path")
    if "\0" in text:
        raise ConfigError(
            f"{what} has a NUL character ({text[:80]!r}), which the system does not accept there: leave it out, or "
            "pass the text on stdin or in a file"
        )
    return text


@contextlib.contextmanager
def _startable(program: str) -> Iterator[None]:
    """Explain why the system refuses a program, its arguments or its environment."""
    try:
        yield
    except OSError as error:
        remedy = "; pass long texts on stdin or in a file" if error.errno == errno.E2BIG else ""
        raise ConfigError(f"{program!r} cannot be started: {error.strerror or error}{remedy}") from error
    except ValueError as error:  # invalid Unicode, or an invalid variable name
        raise ConfigError(f"{program!r} cannot be started: {error}") from error


class _Watch:
    """Reads the output of a program and the report of its supervisor until both end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        limits: ProgramLimits,
        on_output: Callable[[Stream, bytes], None] | None,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._process = process
        self._control = control
        self._limits = limits
        self._on_output = on_output or (lambda stream, data: None)
        self._is_wanted = is_wanted
        self._printed: dict[Stream, HeadAndTail] = {
            "stdout": HeadAndTail(limits.max_output_bytes),
            "stderr": HeadAndTail(limits.max_output_bytes),
        }
        self._report = b""
        self._started = time.monotonic()
        self._ended = self._timed_out = False

    def result(self, program: str) -> ProgramResult:
        try:
            self._read_to_the_end()
        except KeyboardInterrupt:  # the program does not receive it
            self._end()
            self._read_to_the_end()  # a program that prints much as it ends would block on the pipe, and be killed
            raise
        finally:
            self._end()
            self._process.wait()
        report = json.loads(self._report or b"{}")
        if "error" in report:
            raise ConfigError(
                f"{program!r} cannot be started: {report['error']}; install it, or add its folder to PATH"
            )
        if not report:
            code = self._process.returncode
            raise RLLMError(f"the supervisor of {program!r} exited with code {code}; some of its processes may be left")
        for stream, printed in self._printed.items():
            self._on_output(stream, printed.rest())
        return ProgramResult(
            **report,
            stdout=self._printed["stdout"].text(),
            stderr=self._printed["stderr"].text(),
            timed_out=self._timed_out,
            num_dropped_bytes=sum(printed.num_dropped for printed in self._printed.values()),
            duration_s=time.monotonic() - self._started,
        )

    def _read_to_the_end(self) -> None:
        give_up = float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, "report")
            for name in self._printed:
                selector.register(getattr(self._process, name), selectors.EVENT_READ, name)
            while selector.get_map() and time.monotonic() < give_up:
                limit = self._limits.timeout_s
                if not self._ended and limit is not None and time.monotonic() - self._started > limit:
                    self._timed_out = True
                    self._end()
                elif not self._ended and not self._is_wanted():
                    self._end()
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, 65536)
                    if key.data == "report":
                        self._report += data
                    elif head := self._printed[key.data].add(data):
                        self._on_output(key.data, head)
                    if not data:
                        selector.unregister(key.fileobj)
                        give_up = time.monotonic() + _DRAIN_S if key.data == "report" else give_up

    def _end(self) -> None:
        """Make the supervisor end the program. Idempotent."""
        self._ended = True
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_WR)
