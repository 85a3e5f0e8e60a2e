"""Program that starts a sandbox, or enters one's namespaces: to run a command, to copy files, or to listen.

It runs by its path in an interpreter of its own (`arguments`), needs the standard library alone, and imports nothing
after it has entered. It is outside of the sandbox's process namespace, and its child is inside; neither can be read or
traced from there. See namespaces(7), setns(2) and ioctl_ns(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

Job = dict[str, Any]

_NAMESPACES = {"ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
_NEWUSER = 0x10000000
_NS_GET_USERNS = 0xB701
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def arguments(job_fd: int) -> list[str]:
    """Return the command line of this program; the file has the job as JSON, and receives the error, if any."""
    return [sys.executable, "-I", "-S", __file__, str(job_fd)]


def main(job_fd: int) -> NoReturn:
    """Do the job, and exit as its command did."""
    os.set_inheritable(job_fd, False)
    os.lseek(job_fd, 0, os.SEEK_SET)
    job: Job = json.loads(os.read(job_fd, os.fstat(job_fd).st_size))
    os.ftruncate(job_fd, 0)
    try:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        for path in job.get("groups", ()):
            with open(path, "w") as procs:  # noqa: PTH123
                procs.write("0")
        for name, value in job.get("rlimits", {}).items():
            hard = resource.getrlimit(getattr(resource, name))[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(getattr(resource, name), (value, value))
        status = {"start": start, "listen": listen, "exec": enter, "pack": enter, "unpack": enter}[job["do"]](job)
    except Exception as error:
        _report(job_fd, error)
        status = 1
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _report(job_fd: int, error: Exception) -> None:
    os.pwrite(job_fd, f"{type(error).__name__}: {error}".encode(errors="replace")[:4000], 0)


def _checked(result: int, action: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def _enter_owner(namespace: int) -> None:
    """Enter the user namespace that owns another one, unless this process, as root, is above it."""
    if os.geteuid() != 0:
        _checked(_libc.setns(fcntl.ioctl(namespace, _NS_GET_USERNS), _NEWUSER), "setns user")


def start(job: Job) -> NoReturn:
    """Become bubblewrap, as the user of the job; open what it shall bind before, since that user may not reach it."""
    command: list[str] = job["command"]
    for target, text in job["files"].items():
        content = os.memfd_create("file")
        os.write(content, text.encode())
        os.lseek(content, 0, os.SEEK_SET)
        os.set_inheritable(content, True)
        command += ["--file", str(content), target]
    for source, target in job["binds"]:
        opened = os.open(source, os.O_PATH)
        os.set_inheritable(opened, True)
        command += ["--ro-bind-fd", str(opened), target]
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    os.execv(command[0], [*command, *job["init"]])


def listen(job: Job) -> int:
    """Listen on a free port of the network namespace's loopback, and send the socket to the other end of `channel`."""
    namespace = os.open(f"/proc/{job['pid']}/ns/net", os.O_RDONLY)
    if os.fstat(namespace).st_ino != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116
        _enter_owner(namespace)
        _checked(_libc.setns(namespace, _NAMESPACES["net"]), "setns net")
    with socket.socket(fileno=job["channel"]) as channel, socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(channel, [b"listener"], [listener.fileno()])
    return 0


def enter(job: Job) -> int:
    """Do the job in a child that has all namespaces of a process, and none of the rights that entering gave.

    Returns:
        The child's status, see wait(2).
    """
    work: Callable[[Job], None] = {"exec": execute, "pack": pack, "unpack": unpack}[job["do"]]
    if job["do"] != "exec":
        import tarfile  # noqa: F401 - the sandbox has modules of its own, or none
    folder = f"/proc/{job['pid']}/ns/"
    opened = {name: os.open(folder + name, os.O_RDONLY) for name in _NAMESPACES}
    user = os.open(folder + "user", os.O_RDONLY)
    if is_root := os.geteuid() == 0:
        os.setgroups([])
    _enter_owner(opened["mnt"])
    for name, kind in _NAMESPACES.items():
        _checked(_libc.setns(opened[name], kind), f"setns {name}")
    if os.fstat(user).st_ino != os.stat("/proc/self/ns/user").st_ino:  # noqa: PTH116
        _checked(_libc.setns(user, _NEWUSER), "setns user")
    if is_root:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    errors, error = os.pipe()  # closed without a word when the command begins
    child = os.fork()
    if not child:
        try:
            _drop_rights()
            work(job)
            os._exit(0)
        except BaseException as caught:
            os.write(error, f"{type(caught).__name__}: {caught}".encode(errors="replace")[:4000])
            os._exit(1)
    for number in 0, 1, 2:  # so that a reader sees their end when the command's processes have ended
        os.close(number)
    os.close(error)
    text = os.read(errors, 4000)
    _, status = os.waitpid(child, 0)
    if text:
        raise RuntimeError(text.decode(errors="replace"))
    return status


def _drop_rights() -> None:
    """Give up all capabilities for good: entering a user namespace gives all of them."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def execute(job: Job) -> None:
    """Become the command."""
    os.setsid()
    os.chdir(job["cwd"])
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    try:
        os.execvpe(job["command"][0], job["command"], job["env"])
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:  # as a shell reports it
        os.write(2, f"{job['command'][0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


def unpack(job: Job) -> None:
    """Extract a tar archive from stdin to `path`, a file's to that very path."""
    import tarfile

    path: str = job["path"]
    os.umask(0o022)
    with tarfile.open(fileobj=open(0, "rb"), mode="r|") as archive:
        archive.extraction_filter = tarfile.fully_trusted_filter  # this runs inside
        for member in archive:
            target = path if member.name == "." else os.path.join(path, member.name)  # noqa: PTH118
            os.makedirs(os.path.dirname(target) or "/", exist_ok=True)  # noqa: PTH103, PTH120
            member.name = target
            archive.extract(member, "/")


def pack(job: Job) -> None:
    """Write a tar archive of `path` to stdout: files, folders and symbolic links of its file system."""
    import tarfile

    path: str = job["path"]
    device = os.lstat(path).st_dev

    def add(archive: tarfile.TarFile, path: str, name: str) -> None:
        with suppress(PermissionError, FileNotFoundError):  # what the sandbox removes meanwhile, or may not read
            archive.inodes = {}  # type: ignore[attr-defined]  # so that hard links are files
            member = archive.gettarinfo(path, name)
            if member is None or not (member.isfile() or member.isdir() or member.issym()):
                return
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if member.isfile():
                with open(path, "rb") as file:  # noqa: PTH123
                    archive.addfile(member, file)
            elif member.isdir() and os.lstat(path).st_dev == device:
                archive.addfile(member)
                for entry in sorted(os.listdir(path)):  # noqa: PTH208
                    add(archive, os.path.join(path, entry), os.path.join(name, entry))  # noqa: PTH118
            elif member.issym():
                archive.addfile(member)

    with tarfile.open(fileobj=open(1, "wb"), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        add(archive, path, ".")


if __name__ == "__main__":
    main(int(sys.argv[1]))
