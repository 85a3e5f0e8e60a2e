"""Identity of the process that owns sandboxes, and cleanup by a shell or another process when it has ended."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from rllm._runtime.process import no_fork_meanwhile

_PROC = Path("/proc")
_FOLDER = "rllm-"


def this_process() -> str:
    """Return `MACHINE:BOOT:NAMESPACE:PID:START`, which no other process has had.

    Process ids belong to a namespace and are reused. Without a `/proc`, three fields are `0`.
    """
    return ":".join((*_place(), str(os.getpid()), _start(os.getpid())))


def has_ended(owner: str) -> bool:
    """Return whether the process with this `this_process()` is known to have ended.

    A process of another machine is not known to have ended, nor one of another container on this machine.
    """
    machine, boot, namespace, pid, start = (*owner.split(":"), "", "", "", "", "")[:5]
    here = _place()
    if machine != here[0] or not pid.isdecimal():
        return False
    if boot != here[1]:
        return True
    return namespace == here[2] and _start(int(pid)) != start


def _place() -> tuple[str, str, str]:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return socket.gethostname(), boot, str((_PROC / "self/ns/pid").stat().st_ino)
    except OSError:
        return socket.gethostname(), "0", "0"


def _start(pid: int) -> str:
    """Return the time at which a process started, in clock ticks since the boot; "" if there is none."""
    try:
        return (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0" if not _PROC.is_dir() and _exists(pid) else ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def run_after(owner: str, script: str, *arguments: str) -> None:
    """Start a shell, once for each script, that runs the script when this process has ended, for whatever reason.

    Args:
        owner: `this_process()`.
        script: its arguments follow.
        *arguments: strings.
    """
    with no_fork_meanwhile(), contextlib.suppress(OSError):
        shell = subprocess.Popen(
            ["sh", "-c", f"exec 3<&0\n{{ cat >/dev/null\n{script}\n}} <&3 &", "rllm-sandboxes", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        shell.wait()  # it has started another one: Ray's processes kill their children when they end
        _shells.append(shell)


_shells: list[subprocess.Popen[bytes]] = []
"""Their standard input ends with this process."""


@functools.cache
def own_folder() -> Path:
    """Return a folder for temporary files, which is deleted when this process has ended, for whatever reason.

    If the machine lost its power, or all processes were killed together, the next process deletes it.
    """
    place = Path(tempfile.gettempdir())
    for folder in place.glob(f"{_FOLDER}*:*"):
        if has_ended(folder.name.removeprefix(_FOLDER)):
            shutil.rmtree(folder, ignore_errors=True)
    prefix = f"{_FOLDER}{this_process()}:"
    run_after(this_process(), 'rm -rf -- "$1"*', str(place / prefix))  # first: this process may end in between
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
