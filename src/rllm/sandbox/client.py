"""Sandboxes that are reached through a client program, such as `podman exec` or `kubectl exec`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any
from weakref import WeakKeyDictionary

from rllm._runtime.ids import new_id
from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.threads import in_thread
from rllm._runtime.untrusted import HeadAndTail
from rllm.errors import last_lines
from rllm.sandbox.base import Command, ExecResult, Sandbox, SandboxError, Stream
from rllm.sandbox.files import file_of, holds_folder, max_archive_bytes, pack, unpack

TRANSFER_TIMEOUT_S = 600.0
"""Seconds for an upload or a download."""
ASK_TIMEOUT_S = 120.0
"""Seconds for a command of a client program itself."""
_KILL_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 16
MARK = "_RLLM_COMMAND"
"""Variable that names the command to which a process in a sandbox belongs."""

# Repeated until no process is left, since a process may start others between the search and the kill.
KILL = f"""
for round in 1 2 3 4 5 6 7 8; do
  found=
  for file in /proc/[0-9]*/environ; do
    if grep -qsF "{MARK}=$1" "$file"; then
      id=${{file#/proc/}}; kill -9 "${{id%/environ}}" 2>/dev/null; found=1
    fi
  done
  [ "$found" ] || exit 0
done
exit 1
"""
# GNU tar ends with 1 if files changed meanwhile: a server that an agent left running may write its log.
PACK = """
pack() {
  tar "$@"; code=$?
  if [ $code = 1 ] && tar --version 2>/dev/null | grep -q GNU; then code=0; fi
  exit $code
}
if [ -d "$1" ]; then pack -cf - -C "$1" .; fi
[ -e "$1" ] || { echo "no such file" >&2; exit 3; }
pack -chf - -C "$(dirname -- "$1")" "$(basename -- "$1")"
"""
FIND_FOLDER = 'folder=${1:-$PWD}; [ "$folder" != / ] || folder=/app; mkdir -p -- "$folder" && echo "$folder"'
"""Makes the working directory of an image that this machine does not know, and prints it."""
UNPACK = 'mkdir -p -- "$1" && exec tar -xf - -C "$1"'


GAP = "\n... {:,} bytes omitted ...\n"
"""Text that stands for the middle of an output, with the number of its bytes."""


class OutputKeeper:
    """Beginning and end of the two streams of a command, and the pieces before the limit for `on_output`."""

    def __init__(self, max_bytes: int, on_output: Callable[[Stream, bytes], None] | None = None) -> None:
        """Keep `max_bytes` of each stream: half from each end."""
        self._max_bytes = max_bytes
        self._on_output = on_output
        self._kept: dict[Stream, HeadAndTail] = {
            "stdout": HeadAndTail(max_bytes, gap=GAP),
            "stderr": HeadAndTail(max_bytes, gap=GAP),
        }

    def add(self, stream: Stream, data: bytes) -> None:
        """Keep a piece of output, or what the limit leaves of it."""
        kept = self._kept[stream]
        if self._on_output and kept.num_seen < self._max_bytes:
            self._on_output(stream, data[: self._max_bytes - kept.num_seen])
        kept.add(data)

    @property
    def num_dropped_bytes(self) -> int:
        """Return the bytes of both streams that were not kept."""
        return sum(kept.num_dropped for kept in self._kept.values())

    def text(self, stream: Stream) -> str:
        """Return what was kept of a stream."""
        return self._kept[stream].text()


async def run_program(
    argv: Sequence[str],
    on_output: Callable[[Stream, bytes], None],
    *,
    stdin: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    kill: Callable[[], Coroutine[Any, Any, object]] | None = None,
) -> ExecResult:
    """Run a program of this machine to its end; end it at its deadline, after cancellation and after errors.

    The result has no output: `on_output` receives it.

    Args:
        argv: the program and its arguments.
        on_output: called with each piece of output.
        stdin: an open file, by default empty.
        env: all of its variables, by default this process's.
        cwd: its current folder, by default this process's.
        timeout_s: seconds until the deadline.
        kill: ends what the program started elsewhere, before the program itself is ended.

    Raises:
        SandboxError: if it cannot be started.
    """
    process = _start(argv, stdin=stdin, env=env, cwd=cwd)
    assert process.stdout
    assert process.stderr
    failed = asyncio.get_running_loop().create_future()
    finished = asyncio.gather(
        _read(process.stdout, "stdout", on_output, failed),
        _read(process.stderr, "stderr", on_output, failed),
        in_thread(process.wait, name=f"waiting for {argv[0]}"),
    )
    finished.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio logs its cancellation
    try:
        await asyncio.wait([finished, failed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        timed_out = not finished.done() and not failed.done()
    finally:
        try:
            await uncancelled(_end(process, finished, kill))
        finally:  # a loop that ends cancels all tasks, including the one that ends the program
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
    if failed.done():
        failed.result()
    exit_code = -9 if process.returncode is None else process.returncode
    return ExecResult(exit_code=exit_code, stdout="", stderr="", timed_out=timed_out)


def _start(
    argv: Sequence[str], *, stdin: IO[bytes] | None, env: Mapping[str, str] | None, cwd: Path | None
) -> subprocess.Popen[bytes]:
    """Start a program that inherits only its standard streams.

    asyncio under uvloop hands over all open files: a process that the program leaves behind, such as podman's monitor,
    would keep its pipes open, and the end of the output would never come.
    """
    try:
        with no_fork_meanwhile():
            return subprocess.Popen(
                argv,
                stdin=stdin or subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C is for this process, which then closes its sandboxes
            )
    except OSError as error:  # the agent that wanted the command is not to blame
        raise SandboxError(f"{argv[0]} cannot be started on this machine: {error}") from error


async def _read(
    pipe: IO[bytes],
    stream: Stream,
    on_output: Callable[[Stream, bytes], None],
    failed: asyncio.Future[None],
) -> None:
    """Pass on what a pipe has, and close it.

    `connect_read_pipe` is not used: uvloop's transport closes the descriptor twice, and by the second time its number
    may belong to a file that another thread has just opened.
    """
    loop, descriptor = asyncio.get_running_loop(), pipe.fileno()
    ended = loop.create_future()

    def read() -> None:
        try:
            piece = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not piece:
            loop.remove_reader(descriptor)
            if not ended.cancelled():
                ended.set_result(None)
        elif not failed.done():  # after an error it is read to its end, so that the program can end
            try:
                on_output(stream, piece)
            except Exception as error:
                failed.set_exception(error)

    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, read)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        pipe.close()


async def _end(
    process: subprocess.Popen[bytes],
    finished: asyncio.Future[Any],
    kill: Callable[[], Coroutine[Any, Any, object]] | None,
) -> None:
    """End a program that has not finished; the waits are for the rest of its output."""
    if not finished.done():
        if kill:
            await kill()
        else:
            process.terminate()
        await asyncio.wait([finished], timeout=1.0 if kill else 5.0)
    if not finished.done():
        process.kill()
        await asyncio.wait([finished], timeout=5.0)
    if not finished.done():
        finished.cancel()
        await asyncio.wait([finished])


async def ask(
    argv: Sequence[str],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = ASK_TIMEOUT_S,
    max_output_bytes: int = 1 << 24,
) -> ExecResult:
    """Run a client program for its output."""
    kept = OutputKeeper(max_output_bytes)
    with file_of(stdin) as file:
        ended = await run_program(argv, kept.add, stdin=file, env=env, cwd=cwd, timeout_s=timeout_s)
    return replace(ended, stdout=kept.text("stdout"), stderr=kept.text("stderr"))


def end_of(result: ExecResult) -> str:
    """Return the end of a client's output, for an error."""
    if result.timed_out:
        return "the program did not end in time"
    return last_lines(result.output) if result.output else f"exit code {result.exit_code}"


async def uncancelled(work: Coroutine[Any, Any, object]) -> None:
    """Wait until the work is done, even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    task.result()
    if cancelled:
        raise cancelled


_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = WeakKeyDictionary()


def lock_of(image: str) -> asyncio.Lock:
    """Return the lock of an image that is built; each event loop has its own, since a lock belongs to one."""
    return _locks.setdefault(asyncio.get_running_loop(), {}).setdefault(image, asyncio.Lock())


class ClientSandbox(Sandbox):
    """A sandbox in which a client program runs each command."""

    end_reason: str | None = None
    """Reason for which this process ended the sandbox."""

    @abstractmethod
    def client(
        self, program: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: bool, as_root: bool = False
    ) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """Return the client's command line that runs a program in the sandbox, and the client's own variables."""

    @abstractmethod
    async def is_running(self) -> bool:
        """Return whether the sandbox runs."""

    @abstractmethod
    def is_lost(self, result: ExecResult) -> bool:
        """Return whether the client may have failed, rather than the command."""

    def stdin_of_client(self, env: Mapping[str, str]) -> str:
        """Return text to put before the command's standard input, from which a client may read variables."""
        return ""

    def command_ended(self, mark: str) -> None:
        """Clean up after a command; it may have left processes."""

    def own_stderr(self, stderr: str) -> str:
        """Return what a command wrote, without what the client adds."""
        return stderr

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
        timeout_s: float | None = None,
        max_output_bytes: int = 1_000_000,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command to its end, see `Sandbox.exec`."""
        self._check_open()
        mark = new_id()
        program = ["sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {**(env or {}), MARK: mark}
        typed = self.stdin_of_client(variables) + input
        argv, client_env = self.client(program, cwd=cwd or self.workdir, env=variables, stdin=bool(typed))
        kept = OutputKeeper(max_output_bytes, on_output)
        began = time.monotonic()
        with contextlib.ExitStack() as files:
            ended = await self._run(
                mark,
                argv,
                kept.add,
                stdin=files.enter_context(file_of(typed)) if typed else None,
                env=client_env,
                timeout_s=timeout_s,
                kill=lambda: self._kill(mark),
            )
        result = ExecResult(
            exit_code=-9 if ended.timed_out else with_signal(ended.exit_code),
            stdout=kept.text("stdout"),
            stderr=self.own_stderr(kept.text("stderr")),
            timed_out=ended.timed_out,
            num_dropped_bytes=kept.num_dropped_bytes,
            duration_s=time.monotonic() - began,
        )
        if not result.timed_out and self.is_lost(result) and not await self.is_running():
            self._check_open()
            reason = f": {last_lines(result.stderr)}" if result.stderr else ""
            raise SandboxError(
                f"sandbox {self.id} ended while a command ran: it was killed from outside, or its memory was used up "
                f"(raise sandbox.memory_mb){reason}"
            )
        return result

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or the content of a folder, to a path in the sandbox; root owns it there."""
        self._check_open()
        path, is_folder = PurePosixPath(target), await in_thread(source.is_dir, name="looking for files to upload")
        with tempfile.TemporaryFile() as archive:
            await in_thread(lambda: pack(source, archive, name=path.name), name="packing files for a sandbox")
            archive.seek(0)
            folder = path if is_folder else path.parent
            kept, ended = await self._transfer(UNPACK, [str(folder)], stdin=archive)
        if not ended.ok:
            raise SandboxError(f"cannot write {target} in sandbox {self.id}: {reason_of(kept, ended)}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy a file, or the content of a folder, from the sandbox to a path here; see `Sandbox.download`."""
        self._check_open()
        with tempfile.TemporaryFile() as archive:

            def write(stream: Stream, data: bytes) -> None:
                if stream == "stdout":
                    if archive.tell() + len(data) > max_archive_bytes(max_bytes):
                        raise SandboxError(f"{source} in sandbox {self.id} has more than max_bytes={max_bytes:,} bytes")
                    archive.write(data)

            kept, ended = await self._transfer(PACK, [source], on_output=write)
            if not ended.ok:
                raise SandboxError(f"cannot read {source} in sandbox {self.id}: {reason_of(kept, ended)}")
            archive.seek(0)
            await in_thread(
                lambda: unpack(archive, target, into_folder=holds_folder(archive), max_bytes=max_bytes),
                name="unpacking files of a sandbox",
            )

    async def _transfer(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        stdin: IO[bytes] | None = None,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> tuple[OutputKeeper, ExecResult]:
        mark = new_id()
        argv, env = self.client(
            ["sh", "-c", script, "sh", *arguments], cwd="/", env={MARK: mark}, stdin=stdin is not None, as_root=True
        )
        kept = OutputKeeper(4096)

        def add(stream: Stream, data: bytes) -> None:
            kept.add(stream, data)
            if on_output:
                on_output(stream, data)

        kill = partial(self._kill, mark, as_root=True)
        ended = await self._run(mark, argv, add, stdin=stdin, env=env, timeout_s=TRANSFER_TIMEOUT_S, kill=kill)
        if ended.exit_code != 0 and not await self.is_running():
            self._check_open()
            raise SandboxError(f"sandbox {self.id} has ended: {kept.text('stderr').strip()}")
        return kept, ended

    async def _run(self, mark: str, *arguments: Any, **options: Any) -> ExecResult:
        """Run a command's client, see `run_program`."""
        try:
            return await run_program(*arguments, **options)
        finally:
            self.command_ended(mark)

    async def _kill(self, mark: str, *, as_root: bool = False) -> None:
        """Kill a command and all that it started; end the sandbox if that fails, as with a fork bomb."""
        argv, env = self.client(["sh", "-c", KILL, "sh", mark], cwd="/", env={}, stdin=False, as_root=as_root)
        ended = await run_program(argv, OutputKeeper(0).add, env=env, timeout_s=_KILL_TIMEOUT_S)
        if not ended.ok:
            await self.end("a command could not be killed at its deadline")

    async def end(self, reason: str) -> None:
        """Close the sandbox; commands raise the reason from now on."""
        self.end_reason = self.end_reason or reason
        await self.close()

    def _check_open(self) -> None:
        if self.end_reason:
            raise SandboxError(f"sandbox {self.id} has ended: {self.end_reason}")


def with_signal(exit_code: int) -> int:
    """Return an exit code in the form of `ExecResult`: clients report 128 plus the number of a signal."""
    return 128 - exit_code if 128 < exit_code <= 128 + signal.SIGRTMAX else exit_code


def reason_of(kept: OutputKeeper, ended: ExecResult) -> str:
    """Return why a program failed."""
    return "the deadline passed" if ended.timed_out else last_lines(kept.text("stderr"))
