"""Program that starts a sandbox, or enters the namespaces of one to run a command or to listen.

It runs in an interpreter of its own (`arguments`), and needs only the standard library. It imports as little as
possible, because each command waits for it, and nothing after it has entered. It is outside of the sandbox's process
namespace, and its child is inside; neither can be read or traced from there. See namespaces(7), setns(2) and
ioctl_ns(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import stat
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn, TypeAlias

    Job: TypeAlias = Mapping[str, Any]

_RUN = "import sys; sys.path.append(sys.argv[1]); from namespaces import main; main(sys.argv[2], sys.argv[3:])"
"""Imports this module from its folder, without the package; by its path, it would be compiled each time."""
FAILED = 125
"""Exit code if the job could not be done; the reason is on stderr."""
_VARIABLE = "_RLLM."
_PIECE, _PIPE_PIECES = 1 << 16, 16
"""Bytes to copy at once, and the number of times that this may be done to empty a pipe."""
_NAMESPACES = {
    "cgroup": 0x02000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
_NEWUSER = 0x10000000
_NS_GET_USERNS = 0xB701
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def arguments(job: Job, command: Sequence[str] = ()) -> list[str]:
    """Return the command line of this program."""
    folder = os.path.dirname(__file__)  # noqa: PTH120
    return [sys.executable, "-I", "-S", "-c", _RUN, folder, json.dumps(job), *command]


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return a command's variables, renamed so that a loader's cannot affect this program, which restores them."""
    return {_VARIABLE + name: value for name, value in env.items()}


def main(text: str, command: list[str]) -> NoReturn:
    """Do the job, and exit with the exit code of its command."""
    job: Job = json.loads(text)
    try:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _close_files(except_for=job.get("pass_fds", ()))
        for path in job.get("groups", ()):
            with open(path, "w") as processes:  # noqa: PTH123
                processes.write("0")
        for name, value in job.get("rlimits", {}).items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os._exit({"start": start, "listen": listen, "exec": enter}[job["do"]](job, command))
    except Exception as error:
        os.write(2, f"the sandbox could not be entered: {error}\n".encode(errors="replace")[:4000])
        os._exit(FAILED)


def _close_files(*, except_for: Sequence[int]) -> None:
    """Close all inherited files but the standard streams and these: uvloop passes on whatever can be inherited."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number > 2 and number not in except_for:
            with suppress(OSError):  # the listing's own
                os.close(number)


def _check(result: int, action: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def _enter_owner(namespace: int) -> None:
    """Enter the user namespace that owns another one, unless this process, as root, is above it."""
    if os.geteuid() != 0:
        _check(_libc.setns(fcntl.ioctl(namespace, _NS_GET_USERNS), _NEWUSER), "setns user")


def start(job: Job, command: list[str]) -> NoReturn:
    """Become bubblewrap, as the user of the job."""
    program, *options = command
    for target, text in job["files"].items():
        content = os.memfd_create("file")
        os.write(content, text.encode())
        os.lseek(content, 0, os.SEEK_SET)
        os.set_inheritable(content, True)
        options += ["--file", str(content), target]
    sources = [source for source, _ in job["binds"]]
    if job["uid"] is not None:
        sources = _within_reach(sources)
    for source, (_, target) in zip(sources, job["binds"], strict=True):
        options += ["--ro-bind", source, target]
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    os.execve(program, [program, *options, *job["init"]], {})


def _within_reach(sources: list[str]) -> list[str]:
    """Mount files and folders in a folder that every user may enter, in a mount namespace of this process's own."""
    folder = "/tmp"
    _check(_libc.unshare(_NAMESPACES["mnt"]), "unshare mnt")
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    opened = [os.open(source, os.O_PATH) for source in sources]
    _mount("tmpfs", folder, 0, kind=b"tmpfs")
    os.chmod(folder, 0o755)  # noqa: PTH101
    made = [f"{folder}/{number}" for number in range(len(sources))]
    for source, target in zip(opened, made, strict=True):
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.mkdir(target)  # noqa: PTH102
        else:
            os.close(os.open(target, os.O_CREAT))
        _mount(f"/proc/self/fd/{source}", target, _MS_BIND | _MS_REC)
        os.close(source)
    return made


def _mount(source: str, target: str, flags: int, *, kind: bytes | None = None) -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind, flags, None), f"mount {target}")


def listen(job: Job, _: list[str]) -> int:
    """Listen on a free port of a network namespace's loopback, and send its socket through the first one passed."""
    import socket

    namespace = os.open(f"/proc/{job['pid']}/ns/net", os.O_RDONLY)
    if os.fstat(namespace).st_ino != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116
        _enter_owner(namespace)
        _check(_libc.setns(namespace, _NAMESPACES["net"]), "setns net")
    with socket.socket(fileno=job["pass_fds"][0]) as channel, socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(channel, [b"listener"], [listener.fileno()])
    return 0


def enter(job: Job, command: list[str]) -> int:
    """Run the command in all namespaces of a process, without the privileges of entering; return its exit code."""
    import signal
    import warnings  # noqa: F401 - which `os.execvpe` would import after it has entered

    env = {name.removeprefix(_VARIABLE): value for name, value in os.environ.items() if name.startswith(_VARIABLE)}
    folder = f"/proc/{job['pid']}/ns/"
    opened = {name: os.open(folder + name, os.O_RDONLY) for name in _NAMESPACES}
    user = os.open(folder + "user", os.O_RDONLY)
    if is_root := os.geteuid() == 0:
        with suppress(PermissionError):  # root of a user namespace without groups
            os.setgroups([])
    _enter_owner(opened["mnt"])
    has_own_user = os.fstat(user).st_ino != os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116
    for name, kind in _NAMESPACES.items():
        _check(_libc.setns(opened[name], kind), f"setns {name}")
    if has_own_user:
        _check(_libc.setns(user, _NEWUSER), "setns user")
    if is_root:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    pipes = {number: os.pipe() for number in (1, 2)}
    child = os.fork()
    if not child:
        try:
            for number, (_, writer) in pipes.items():
                os.dup2(writer, number)
            for number in range(1, signal.NSIG):  # this interpreter ignores some
                with suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
            _become(command, cwd=job["cwd"], env=env)
        finally:
            os._exit(FAILED)
    for _, writer in pipes.values():
        os.close(writer)
    _forward({reader: number for number, (reader, _) in pipes.items()}, until=os.pidfd_open(child))
    status = os.waitpid(child, 0)[1]
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)  # as in a shell


def _forward(outputs: dict[int, int], *, until: int) -> None:
    """Copy a command's output until it closes it or ends: processes that it leaves behind may hold the output open."""
    while outputs:
        ready, _, _ = select.select([*outputs, until], [], [])
        for reader in set(ready) & set(outputs):
            _copy_piece(reader, outputs)
        if until in ready:
            for reader in list(outputs):
                os.set_blocking(reader, False)
                for _ in range(_PIPE_PIECES):
                    if reader in outputs:
                        _copy_piece(reader, outputs)
            return


def _copy_piece(reader: int, outputs: dict[int, int]) -> None:
    try:
        piece = os.read(reader, _PIECE)
    except BlockingIOError:
        piece = b""
    if not piece:
        number = outputs.pop(reader)
        os.close(number)
    while piece:
        piece = piece[os.write(outputs[reader], piece) :]


def _become(command: list[str], *, cwd: str, env: dict[str, str]) -> None:
    """Give up all capabilities for good, and become the command."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.setsid()
    os.umask(0o022)
    try:
        os.chdir(cwd)
        os.execvpe(command[0], command, env)
    except OSError as error:  # as a shell reports it
        os.write(2, f"{error.filename or command[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)
