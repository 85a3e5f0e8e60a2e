"""The program that a sandboxed process runs: shut the doors, then run the code that it was given.

Started by `rllm.tools.sandbox` as `python -I sandbox_child.py JOB_FD REPORT_FD`; it imports nothing of ours. The order is
what matters: everything is imported, then network and processes go out of reach, then the limits come, then the foreign code
runs.
"""

from __future__ import annotations

import ast
import ctypes
import json
import linecache
import os
import resource
import signal
import socket
import sys
import traceback
import types
from contextlib import suppress
from typing import Any

FILE_NAME = "program.py"
MEBIBYTE = 1 << 20
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _MS_REC, _MS_PRIVATE = 1, 0x4000, 0x40000
_STARTS_A_PROCESS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_LOOKS_UP_A_HOST = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}


def main(job_fd: int, report_fd: int) -> None:
    """Read the job, report how the network was shut off, and run the code."""
    with open(job_fd, encoding="utf-8") as file:
        job: dict[str, Any] = json.load(file)
    namespaced = enter_namespaces()
    with open(report_fd, "w") as file:
        file.write("namespace" if namespaced else "blocked in python")
    die_with_parent()  # after the namespaces, which would reset it
    if namespaced:
        go_on_as_a_child()
    limit_resources(job, max_processes=job["max_processes"] if namespaced else None)
    if not namespaced:
        sys.addaudithook(refuse)
    run(job["code"], show_last_value=job["show_last_value"])


def enter_namespaces() -> bool:
    """Leave every network interface behind, and every process to its children: these see none but each other.

    The user namespace lets anyone do so, and hides the parent's environment.
    """
    if sys.platform != "linux":
        return False
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS
    if libc.unshare(_CLONE_NEWUSER | namespaces) != 0:
        return bool(libc.unshare(namespaces) == 0)
    with suppress(OSError):  # without the maps the code runs as the overflow user, and nothing else differs
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    return True


def die_with_parent() -> None:
    """Leave no process behind when the one that started this one is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on_as_a_child() -> None:
    """Return in a process that can signal none outside; the process before it ends as this one does.

    The first process of the namespace only waits: all others end with it, and many signals do nothing to it.
    """
    if os.fork() == 0:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # else the orphans that it inherits would stay
        while True:
            signal.pause()
    program = os.fork()
    if program == 0:
        die_with_parent()
        libc = ctypes.CDLL(None)  # where a container forbids the second of these, `/proc` tells of others' processes
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
        return
    exit_code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # of SIGKILL
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def limit_resources(job: dict[str, Any], max_processes: int | None) -> None:
    """Soft limits, and hard ones equal to them but for CPU, whose hard limit kills what ignores SIGXCPU.

    `max_processes` makes sense only in a user namespace of one's own: elsewhere the kernel counts the user's other
    processes too.
    """
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (job["cpu_s"], job["cpu_s"] + 1),
        resource.RLIMIT_FSIZE: (job["file_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (job["max_open_files"],) * 2,
        resource.RLIMIT_AS: (job["memory_mb"] * MEBIBYTE,) * 2,
    }
    if max_processes is not None:
        limits[resource.RLIMIT_NPROC] = (max_processes, max_processes)
    for kind, pair in limits.items():
        with suppress(ValueError, OSError):  # the system lacks this limit, or has a stricter one already
            resource.setrlimit(kind, pair)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no sockets but local ones, no signals to others, and no other programs, which would not have this hook."""
    if event == "socket.__new__" and arguments[1] not in (socket.AF_UNIX, -1):
        raise PermissionError("the sandbox has no network")
    if event in _LOOKS_UP_A_HOST:
        raise PermissionError("the sandbox has no network")
    if event == "os.killpg" or (event == "os.kill" and arguments[0] != os.getpid()):
        raise PermissionError("the sandbox signals no other processes on this machine")
    if event in _STARTS_A_PROCESS:
        raise PermissionError("the sandbox starts no other processes on this machine")


def run(code: str, *, show_last_value: bool) -> None:
    """Run the code as `__main__`; what it raises is shown with its own frames only."""
    program = types.ModuleType("__main__")
    program.__dict__["__file__"] = FILE_NAME
    sys.modules["__main__"], sys.argv = program, [FILE_NAME]
    linecache.cache[FILE_NAME] = (len(code), None, [f"{line}\n" for line in code.split("\n")], FILE_NAME)
    parts: list[types.CodeType] = []
    try:
        parts += compiled(code, show_last_value=show_last_value)
        for part in parts:
            exec(part, program.__dict__)
    except Exception as error:
        own_frames = error.__traceback__.tb_next if parts and error.__traceback__ else None
        traceback.print_exception(error.with_traceback(own_frames))
        sys.exit(1)


def compiled(code: str, *, show_last_value: bool) -> list[types.CodeType]:
    """The program; and apart from it its last line, where that is an expression whose value is to be shown."""
    tree = ast.parse(code, FILE_NAME)
    if not (show_last_value and tree.body and isinstance(tree.body[-1], ast.Expr)):
        return [compile(tree, FILE_NAME, "exec")]
    last = ast.Interactive([tree.body.pop()])
    return [compile(tree, FILE_NAME, "exec"), compile(last, FILE_NAME, "single")]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
