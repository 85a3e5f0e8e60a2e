"""Program that a sandboxed process runs: it gives up every right that it can, then runs the code of its job.

Started by `rllm.tools.sandbox` as `python -I sandbox_child.py JOB_FD REPORT_FD`; it imports nothing of ours. The order
matters: everything is imported; namespaces, mounts and limits are set up with the capabilities of a user namespace; all
capabilities are dropped for good; the report is written and closed; then the foreign code runs.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import json
import linecache
import os
import platform
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

FILE_NAME = "program.py"
MEBIBYTE = 1 << 20
FOLDER_OPTIONS = b"mode=0700,size=64m,nr_inodes=10000"
"""Of the work folder in memory: a few of the largest files, and a number of names that the kernel drops in no time."""
DEVICES_OPTIONS = b"mode=0755,size=16m,nr_inodes=1000"
_DEVICES = ("null", "zero", "full", "random", "urandom")

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_ANY_NEW_NAMESPACE = 0x7E020000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_AT_FDCWD, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
_STARTS_A_PROCESS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_LOOKS_UP_A_HOST = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}


def main(job_fd: int, report_fd: int) -> None:
    """Read the job, shut every door, report which of them do not shut on this machine, and run the code."""
    with open(job_fd, encoding="utf-8") as file:
        job: dict[str, Any] = json.load(file)
    missing: list[str] = []
    namespaced = enter_namespaces()
    die_with_parent()  # after the namespaces, which would reset it
    if namespaced:
        continue_as_a_child()
        missing += isolate_files(job["folder"])
    else:
        missing += ["processes", "files"]
    limit_resources(job, max_processes=job["max_processes"] if namespaced else None)
    missing += give_up_privileges(namespaced)
    if not namespaced:
        sys.addaudithook(refuse)
    network = "namespace" if namespaced else "blocked in python" if "calls" in missing else "filter"
    with open(report_fd, "w") as file:
        json.dump({"network": network, "missing": missing}, file)
    run(job["code"], show_last_value=job["show_last_value"])


def enter_namespaces() -> bool:
    """Leave every network interface, shared memory, mount and process of others.

    Any user may do this in a user namespace, which also hides the parent's environment. No further namespace can be
    created inside.
    """
    if sys.platform != "linux":
        return False
    uid, gid = os.getuid(), os.getgid()
    namespaces = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC
    if _libc().unshare(_CLONE_NEWUSER | namespaces) != 0:
        return bool(_libc().unshare(namespaces) == 0)
    with suppress(OSError):  # without the maps the code runs as the overflow user, and nothing else differs
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            _write(f"/proc/self/{name}", text)
    for name, value in ("user_namespaces", 0), ("inotify_instances", 8), ("inotify_watches", 1000):
        with suppress(OSError):  # these are of this user namespace, and of what it takes from the user's share
            _write(f"/proc/sys/user/max_{name}", str(value))
    return True


def die_with_parent() -> None:
    """Kill all processes when the one that started this one is killed."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def continue_as_a_child() -> None:
    """Return in a process that can signal none outside; the process before it ends as this one does.

    The first process of the namespace only waits: all others end with it, and many signals do nothing to it.
    """
    if os.fork() == 0:
        _only_wait()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # else the orphans that it inherits would stay
        while True:
            signal.pause()
    program = os.fork()
    if program == 0:
        die_with_parent()
        os.setsid()  # a signal to its group reaches only its own
        return
    _only_wait()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # of SIGKILL
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def _only_wait() -> None:
    """Keep nothing that the code could take from this process: no capability, no file, no memory that it may read."""
    drop_capabilities()
    die_with_parent()
    _libc().prctl(_PR_SET_DUMPABLE, 0)
    os.closerange(0, 1 << 20)


def isolate_files(folder: str) -> list[str]:
    """Mount an empty folder in memory, show own processes and harmless devices only, and make other files read-only.

    Returns:
        What could not be done: `processes` of others stay visible in `/proc`, or `files` and devices writable.
    """
    missing = []
    _libc().mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    for file_system in b"proc", b"tmpfs":  # where a container forbids the first of these, there is an empty folder
        if _libc().mount(file_system, b"/proc", file_system, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None) == 0:
            break
    else:
        missing.append("processes")
    _bound_roots_processes()
    try:
        devices = {name: _call(_OPEN_TREE, _AT_FDCWD, f"/dev/{name}".encode(), _OPEN_TREE_CLONE) for name in _DEVICES}
        restrictions = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
        _call(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, restrictions, len(restrictions))
        _mount_memory("/dev", DEVICES_OPTIONS)
        for name, tree in devices.items():
            os.close(os.open(f"/dev/{name}", os.O_CREAT))
            _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, f"/dev/{name}".encode(), _MOVE_MOUNT_F_EMPTY_PATH)
            os.close(tree)
        for name, target in ("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"):
            os.symlink(f"/proc/self/{target}", f"/dev/{name}")  # noqa: PTH211
        os.mkdir("/dev/shm")  # noqa: PTH102
        os.chmod("/dev/shm", 0o1777)  # noqa: PTH101
        _mount_memory(folder, FOLDER_OPTIONS)
    except OSError:  # a kernel before 5.12, or a container that forbids it
        missing.append("files")
    os.chdir(folder)  # the one that lies over the old one
    return missing


def _mount_memory(folder: str, options: bytes) -> None:
    if _libc().mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount memory at {folder}")


def _bound_roots_processes() -> None:
    """Bound the processes of this namespace where the kernel counts them by namespace: root has no other limit."""
    release = platform.release().split(".")
    if all(part.isdigit() for part in release[:2]) and tuple(map(int, release[:2])) >= (
        6,
        14,
    ):  # else it is the machine's
        with suppress(OSError):
            _write("/proc/sys/kernel/pid_max", "301")  # the least that the kernel takes


def limit_resources(job: dict[str, Any], max_processes: int | None) -> None:
    """Set soft limits, and hard ones equal to them but for CPU, whose hard limit kills what ignores SIGXCPU.

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
    if hasattr(resource, "RLIMIT_MSGQUEUE"):
        limits[resource.RLIMIT_MSGQUEUE] = (0, 0)
    for kind, pair in limits.items():
        with suppress(ValueError, OSError):  # the system lacks this limit, or has a stricter one already
            resource.setrlimit(kind, pair)


def give_up_privileges(namespaced: bool) -> list[str]:
    """Drop all capabilities, any way to get them back, and the system calls that reach beyond the limits.

    Returns:
        What could not be done: `capabilities` kept, or `calls` not filtered.
    """
    if sys.platform != "linux":
        return ["capabilities", "calls"]
    missing = []
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or not drop_capabilities():
        missing.append("capabilities")
    if not filter_calls(namespaced):
        missing.append("calls")
    if not namespaced:
        _libc().prctl(_PR_SET_DUMPABLE, 0)  # another sandbox would see this one, and could read its memory
    return missing


def drop_capabilities() -> bool:
    """Empty all five sets, for good. Return whether they are empty now."""
    for capability in range(64):  # the kernel refuses numbers that it does not know
        _libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc().prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    return bool(_libc().capset(header, bytes(24)) == 0)


_CALLS = {
    # x86-64, AArch64
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""System calls that are refused, some with some arguments only: memory that no limit counts, mounts, namespaces, keys
of the user, other processes' memory; and connections, since a socket in the file system leads out of the network
namespace. Locks seem to succeed and lock nothing: others would wait for one on a file, which takes no more than the
right to read it."""
_LOCKS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, the two of open files, F_SETLEASE
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_calls(namespaced: bool) -> bool:
    """Refuse `_CALLS` from now on. Return whether this machine can do so."""
    if platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return False
    column, machine = _MACHINES[platform.machine()]
    code = b"".join(_filter({name: numbers[column] for name, numbers in _CALLS.items()}, machine, namespaced))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    return bool(_libc().prctl(_PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def _filter(numbers: dict[str, int], machine: int, namespaced: bool) -> Iterator[bytes]:
    """Yield a program for the kernel's packet filter: a load, a comparison that skips instructions, a verdict."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(kind: int, value: int, if_true: int, if_false: int) -> bytes:
        return struct.pack("HBBI", kind, if_true, if_false, value)

    def refuse_with(number: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, 0x50000 | number)

    equal, at_least, has_bits = 0x15, 0x35, 0x45
    call, first, second = 0, 16, 24  # offsets of the call's number and of its arguments
    yield from (load(4), jump(equal, machine, 1, 0), refuse_with(errno.EPERM))
    yield from (load(call), jump(at_least, 1 << 30, 0, 1), refuse_with(errno.EPERM))  # a second numbering of x86-64
    for name, number in numbers.items():
        if name == "clone":
            yield from (jump(equal, number, 0, 4), load(first))
            yield from (jump(has_bits, _ANY_NEW_NAMESPACE, 0, 1), refuse_with(errno.EPERM), load(call))
        elif name == "socketpair" or (name == "socket" and namespaced):
            yield from (jump(equal, number, 0, 11), load(first), jump(equal, socket.AF_UNIX, 4, 0))
            for index, family in enumerate((socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)):
                yield jump(equal, family, 7 - index, 0)
            yield refuse_with(errno.EPERM)  # others, as to a virtual machine's host, are of no network namespace
            yield from (load(second), struct.pack("HBBI", 0x54, 0, 0, 0xF), jump(equal, socket.SOCK_DGRAM, 0, 1))
            yield from (refuse_with(errno.EPERM), load(call))  # datagrams go to the file system unconnected
        elif name == "fcntl":
            yield from (jump(equal, number, 0, len(_LOCKS) + 3), load(second))
            for left, command in enumerate(reversed(_LOCKS), -len(_LOCKS) + 1):
                yield jump(equal, command, -left, 0 if left else 1)
            yield from (refuse_with(0), load(call))
        else:  # the C library falls back from clone3, whose arguments no filter sees, to clone
            error = {"clone3": errno.ENOSYS, "connect": errno.ENETUNREACH, "flock": 0}.get(name, errno.EPERM)
            yield from (jump(equal, number, 0, 1), refuse_with(error))
    yield struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse sockets but local ones, signals to others, and other programs, which would not have this audit hook."""
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
    """Return the program, and apart from it its last line if that is an expression whose value is shown."""
    tree = ast.parse(code, FILE_NAME)
    if not (show_last_value and tree.body and isinstance(tree.body[-1], ast.Expr)):
        return [compile(tree, FILE_NAME, "exec")]
    last = ast.Interactive([tree.body.pop()])
    return [compile(tree, FILE_NAME, "exec"), compile(last, FILE_NAME, "single")]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
