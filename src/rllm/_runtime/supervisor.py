"""Supervisor of a program, a process of its own: runs a command and finally kills everything that it has started.

    python -I -S supervisor.py CONTROL_FD GRACE_S SCRATCH COMMAND...

On Linux orphans become children of this process (`PR_SET_CHILD_SUBREAPER`), so nothing escapes it, daemons included;
elsewhere only the command's process group is found. CONTROL_FD is a socket: the command is ended when a byte arrives,
or when its other end is closed, which the kernel does for a killed parent; then the folder SCRATCH is removed, if it is
not empty text. The result is written to the socket as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_S = 10.0
"""Seconds to wait for processes that SIGKILL does not end at once, because they are stuck in the kernel."""
_POLL_S = 0.02


def supervised(
    command: Sequence[str], control: socket.socket, *, grace_s: float, scratch: Path | None = None
) -> list[str]:
    """Return the command line that runs a command under a supervisor, which inherits this end of a socket pair."""
    ours = [sys.executable, "-I", "-S", __file__, str(control.fileno()), str(grace_s), str(scratch or "")]
    return [*ours, *command]


def main(control_fd: int, grace_s: float, scratch: str, command: list[str]) -> int:
    """Run the command until it exits or CONTROL_FD ends it, and return its exit code."""
    with (
        socket.socket(fileno=control_fd) as control,
        _woken_by_children() as woken,
        selectors.DefaultSelector() as selector,  # accepts large descriptors
    ):
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_supervisor)
        except OSError as error:
            _report(control, {"error": error.strerror or str(error)})
            return 127  # as a shell does
        leader = process.pid  # `process` stays referenced: its finalizer would wait for the child before us
        exits: dict[int, int] = {}
        while leader not in exits and control not in [key.fileobj for key, _ in selector.select()]:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _reap(exits)
        if leader not in exits and scratch and not control.recv(1):
            shutil.rmtree(scratch, ignore_errors=True)
        num_killed = _end(leader, grace_s, exits)
        exit_code = os.waitstatus_to_exitcode(exits[leader])
        _report(control, {"exit_code": exit_code, "num_killed": num_killed})
        return exit_code


def _end_with_supervisor() -> None:
    """Have Linux kill the command when the thread that started it ends, which is the only one of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when a child ends or a signal arrives; signals have no other effect."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler, since ignored signals stay ignored in the command
    with ours, theirs:
        yield ours
        signal.set_wakeup_fd(-1)


def _reap(exits: dict[int, int]) -> bool:
    """Record how children ended; return whether others remain."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        exits[pid] = status


def _end(leader: int, grace_s: float, exits: dict[int, int]) -> int:
    """Terminate, then kill all remaining processes; return their number."""
    if not _remains(leader, exits):
        return 0
    signalled = _signal_all(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _remains(leader, exits) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    deadline = time.monotonic() + KILL_S
    while _remains(leader, exits) and time.monotonic() < deadline:
        signalled |= _signal_all(leader, signal.SIGKILL)
        time.sleep(_POLL_S)
    exits.setdefault(leader, signal.SIGKILL)
    return len(signalled)


def _remains(leader: int, exits: dict[int, int]) -> bool:
    if _reap(exits):
        return True
    if sys.platform == "linux":
        return False  # every remaining process is a child
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):  # macOS raises the latter for a group that has just ended
        return False
    return True


def _signal_all(leader: int, number: int) -> set[int]:
    """Send a signal to everything below this process; return the ids of the receivers."""
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
            return {leader}
        return set()
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = file.read_bytes().rpartition(b")")[2].split()[:2]  # the name before it may contain anything
            if state != b"Z":
                parents[int(file.parent.name)] = int(parent)
    found: set[int] = set()
    reached = {os.getpid()}
    while reached := {pid for pid, parent in parents.items() if parent in reached} - found:
        found |= reached
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return found


def _report(control: socket.socket, report: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        control.sendall(json.dumps(report).encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
