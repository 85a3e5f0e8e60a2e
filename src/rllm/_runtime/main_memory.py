"""How much main memory this process may use: what the machine has, within the limits of the control groups that it is in.

A container, a job of Slurm's and a service of systemd's are control groups; what they may use is less than what `/proc/meminfo` tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ASSUMED = 8 << 30
"""Bytes, where a system does not say."""


def total_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may use at most."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        installed = ASSUMED
    return min([installed, *(group.limit for group in _groups(root))])


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; `None` where the system does not say."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *(group.limit - group.used for group in _groups(root))]))


@dataclass(frozen=True)
class _Group:
    limit: int
    used: int
    """Without files that are merely cached."""


def _groups(root: Path) -> Iterator[_Group]:
    """Those that this process is in, and theirs, as far as they have a limit; of both versions of control groups."""
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
                yield _Group(int(limit), int(used) - cached)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    rows = (line.split() for line in _read(file).split("\n"))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
