"""Start a program, take in a bounded part of what it prints, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from rllm._runtime.forks import no_fork_meanwhile
from rllm.errors import ConfigError, RLLMError
from rllm.sdk.head_and_tail import HeadAndTail

_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_POLL_S = 0.25
_DRAIN_S = 1.0
"""How long a pipe is read on that a process holds open which could not be killed."""

Argument: TypeAlias = str | os.PathLike[str]
Stream: TypeAlias = Literal["stdout", "stderr"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take."""

    timeout_s: float | None = None
    """`None` for as long as it likes."""
    max_output_bytes: int = 1_000_000
    """How much is kept of its stdout, and as much of its stderr."""
    grace_s: float = 5.0
    """How long its processes have between SIGTERM and SIGKILL."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: use a number of seconds above 0, or None")
        if not self.max_output_bytes >= 0:
            raise ConfigError(f"max_output_bytes={self.max_output_bytes!r}: use 0 or more")
        if not self.grace_s >= 0:
            raise ConfigError(f"grace_s={self.grace_s!r}: use 0 or more seconds")


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """How a program ended, and what it printed."""

    exit_code: int
    """Its own; minus the signal's number if one ended it."""
    stdout: str
    """Beginning and end of it; a line between them says how much is left out, if anything is."""
    stderr: str
    timed_out: bool = False
    """Whether it was ended because its time was up."""
    num_dropped_bytes: int = 0
    """How much of what it printed is left out."""
    num_killed: int = 0
    """How many of its processes were still there in the end, and were ended."""
    duration_s: float = 0.0


def run_supervised(
    command: Sequence[Argument],
    limits: Limits,
    *,
    env: Mapping[str, Argument],
    cwd: Argument | None = None,
    stdin: str | int = "",
    on_output: Callable[[Stream, bytes], None] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> ProgramResult:
    """Run a program to its end, its time limit or the moment when nobody wants it any more; then kill all that it started.

    On Linux that is every process, daemons included, also when this process is killed; elsewhere it is the process group.

    Args:
        command: the program and its arguments; no shell is between.
        limits: what it may take.
        env: its whole environment.
        cwd: the folder that it is started in; else the current one.
        stdin: what it reads, or a file descriptor.
        on_output: hears of the beginning of what it prints at once, of the rest when it has ended.
        is_wanted: asked four times a second.

    Raises:
        ConfigError: if it cannot be started.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command={command!r}: use a list of a program and its arguments")
    if cwd is not None and not Path(cwd).is_dir():
        raise ConfigError(f"cwd={os.fspath(cwd)!r}: there is no such folder")
    program = str(command[0])
    arguments = [_text(item, f"argument {number} of {program!r}") for number, item in enumerate(command)]
    variables = {name: _text(value, f"the variable {name} of {program!r}") for name, value in env.items()}
    if cwd is not None:
        variables["PWD"] = str(Path(cwd).absolute())  # as a shell sets it
    with contextlib.ExitStack() as control:
        with _startable(program), _input(stdin) as source, no_fork_meanwhile():
            ours, theirs = socket.socketpair()
            control.enter_context(ours)
            with theirs:
                process = Context().run(  # where no session is, which would change its environment
                    subprocess.Popen,
                    [sys.executable, "-I", "-S", _SUPERVISOR, str(theirs.fileno()), str(limits.grace_s), *arguments],
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


def _text(given: Any, what: str) -> str:
    """What a program is given, as a text; `what` names it in errors."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ConfigError(f"{what} is {given!r}: use a text or a path")
    if "\0" in text:
        raise ConfigError(
            f"{what} has a NUL character ({text[:80]!r}), where a text ends for the system: leave it out, or hand the text "
            "over on stdin or in a file"
        )
    return text


@contextlib.contextmanager
def _startable(program: str) -> Iterator[None]:
    """Say why the system takes no such program, arguments or environment."""
    try:
        yield
    except OSError as error:
        remedy = "; hand long texts over on stdin or in a file" if error.errno == errno.E2BIG else ""
        raise ConfigError(f"{program!r} cannot be started: {error.strerror or error}{remedy}") from error
    except ValueError as error:  # a text that is no Unicode, a name that no variable can have
        raise ConfigError(f"{program!r} cannot be started: {error}") from error


@contextlib.contextmanager
def _input(stdin: str | int) -> Iterator[IO[bytes] | int]:
    if isinstance(stdin, int) or not stdin:
        yield subprocess.DEVNULL if stdin == "" else int(stdin)
        return
    with tempfile.TemporaryFile() as file:
        file.write(stdin.encode())
        file.seek(0)
        yield file


class _Watch:
    """Reads what a program prints and what its supervisor tells, until there is no more."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        limits: Limits,
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
        except KeyboardInterrupt:  # which the program does not hear of by itself
            self._end()
            self._read_to_the_end()  # one that says much as it ends would wait for us, and be killed
            raise
        finally:
            self._end()
            self._process.wait()
        report = json.loads(self._report or b"{}")
        if "error" in report:
            raise ConfigError(f"{program!r} cannot be started: {report['error']}; is it installed, and on the PATH?")
        if not report:
            code = self._process.returncode
            raise RLLMError(f"what watched over {program!r} ended itself with code {code}; parts of it may be left")
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
                self._end_if_due()
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, 65536)
                    self._take(key.data, data)
                    if not data:
                        selector.unregister(key.fileobj)
                        give_up = time.monotonic() + _DRAIN_S if key.data == "report" else give_up

    def _take(self, name: Any, data: bytes) -> None:
        if name == "report":
            self._report += data
        elif head := self._printed[name].add(data):
            self._on_output(name, head)

    def _end_if_due(self) -> None:
        limit = self._limits.timeout_s
        if self._ended:
            return
        if limit is not None and time.monotonic() - self._started > limit:
            self._timed_out = True
            self._end()
        elif not self._is_wanted():
            self._end()

    def _end(self) -> None:
        """Have the supervisor end the program. Repeatable."""
        self._ended = True
        with contextlib.suppress(OSError):  # it has ended by itself
            self._control.shutdown(socket.SHUT_WR)
