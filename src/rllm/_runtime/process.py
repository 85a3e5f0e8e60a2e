"""This process: Ctrl-C, forks of other threads, and the memory that it may use."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import FrameType

TOGETHER_S = 0.3
"""Signals within this time count as one: `timeout`, terminals and process managers often send two."""

_fork_lock = threading.RLock()


@contextmanager
def on_ctrl_c(handle: object) -> Iterator[None]:
    """Call a handler on Ctrl-C, once for several signals that arrive together.

    Does nothing outside the main thread, which alone has signal handlers.
    """
    if threading.current_thread() is not threading.main_thread() or not callable(handle):
        yield
        return
    handled_at = -math.inf

    def handle_once(number: int, frame: FrameType | None) -> None:
        nonlocal handled_at
        if time.monotonic() - handled_at > TOGETHER_S:
            handled_at = time.monotonic()
            handle(number, frame)

    before = signal.signal(signal.SIGINT, handle_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _renew_lock() -> None:
    # uvloop may call this twice in a child that it starts, so the child gets a new lock rather than releasing one.
    global _fork_lock
    _fork_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _fork_lock.acquire(), after_in_child=_renew_lock, after_in_parent=lambda: _fork_lock.release()
    )


@contextmanager
def no_fork_meanwhile() -> Iterator[None]:
    """Make forks of other threads wait.

    A process forked in the middle of `subprocess.Popen` inherits the pipes of the new program, which then stay open
    until it ends, too. A process forked in the middle of a change to shared state has half of the change.
    """
    with _fork_lock:
        yield


def total_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process may use, within the limits of its control groups."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        installed = 8 << 30  # assumed
    return min([installed, *(limit for limit, _ in _groups(root))])


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the number of bytes that this process may still allocate; `None` if the system does not report it."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *(limit - used for limit, used in _groups(root))]))


def resident_memory() -> int:
    """Return the bytes of main memory that this process holds; 0 if the system does not report it."""
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def peak_memory() -> int:
    """Return the most bytes of main memory that this program has held.

    `ru_maxrss` also counts what the program that started this one held, so it is used only where the system has no
    other number.
    """
    held = _numbers(Path("/proc/self/status")).get("VmHWM:")
    if held is not None:
        return held * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_memory() -> None:
    """Return freed memory to the system if the C library is glibc, which keeps it for the thread that freed it."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def keep_freed_memory() -> None:
    """Let this process use freed memory again until `return_memory`, if the C library is glibc.

    By default glibc returns each large tensor to the system, which clears the memory of the next one page by page.
    """
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, 2**30)
        _mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's parameters, see mallopt(3)."""
_malloc_trim, _mallopt = (
    getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None for name in ("malloc_trim", "mallopt")
)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of each control group (v1 or v2) of this process, parents included, with a limit.

    Cached files are not counted as used.
    """
    for line in filter(None, _read(root / "proc/self/cgroup").split("\n")):
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            mounted, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            mounted = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = PurePosixPath(path)
        for each in (own, *own.parents):
            folder = mounted / each.relative_to("/")
            limit, used = (_read(folder / name).strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal():
                cached = _numbers(folder / "memory.stat").get(names[2], 0)
                yield int(limit), int(used) - cached


def _numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line, keyed by its first word."""
    rows = (line.split() for line in _read(file).split("\n"))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
