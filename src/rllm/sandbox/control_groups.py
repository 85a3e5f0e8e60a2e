"""Control groups, which limit all processes of a sandbox together, in either version of Linux's control groups.

See cgroups(7). A group of this process, or one above it, must be writable: as root, or delegated by systemd.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rllm.sandbox.base import SandboxLimits

_PREFIX = "rllm-sandbox-"
CONTROLLERS = ("pids", "memory", "cpu")
KILL_ALL = """
empty=0
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  processes=$(cat "$1"*/cgroup.procs "$1"*/*/cgroup.procs | grep -vx 0)
  if [ "$processes" ]; then empty=0; kill -9 $processes; else empty=$((empty + 1)); fi
  [ $empty -lt 2 ] || exit 0
  sleep 1
done
"""
"""Shell script that kills the processes in all sandboxes of an owner; its argument is the owner's `group_prefix`."""
_OWN_PROCESSES = 4
"""Number of processes of bubblewrap, and of programs that enter a sandbox for this process."""


@functools.cache
def parents(process: Path = Path("/proc/self")) -> Mapping[str, Path]:
    """Return the group of each controller in which this process can make groups."""
    mounts = [_Mount.read(line) for line in filter(None, _text(process / "mountinfo").split("\n"))]
    found: dict[str, Path] = {}
    for line in filter(None, _text(process / "cgroup").split("\n")):
        _, controllers, path = line.split(":", 2)
        names = set(filter(None, controllers.split(",")))
        for mount in mounts:
            if mount.kind == ("cgroup" if names else "cgroup2") and names <= mount.options:
                own = mount.folder / os.path.relpath(path, mount.root)
                if own.is_relative_to(mount.folder):
                    if not names:
                        found |= _second_version(own, mount.folder)
                    elif _is_writable(own):
                        found |= dict.fromkeys(names & set(CONTROLLERS), own)
                    break
    return found


class _Mount(NamedTuple):
    """A line of `mountinfo`, see proc(5)."""

    root: str
    folder: Path
    kind: str
    options: set[str]

    @classmethod
    def read(cls, line: str) -> _Mount:
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :]
        return cls(fields[3], Path(fields[4]), kind, set(options.split(",")))


def _second_version(own: Path, top: Path) -> dict[str, Path]:
    """Return the nearest group that bounds processes and memory; a group cannot if it has processes itself."""
    for group in (own, *own.parents):
        if not group.is_relative_to(top):
            break
        enabled = _text(group / "cgroup.subtree_control").split()
        for name in set(CONTROLLERS) - set(enabled):
            with suppress(OSError):
                (group / "cgroup.subtree_control").write_text(f"+{name}")
        enabled = _text(group / "cgroup.subtree_control").split()
        if _is_writable(group) and {"pids", "memory"} <= set(enabled):
            return {name: group for name in CONTROLLERS if name in enabled}
    return {}


def _is_writable(group: Path) -> bool:
    return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)


class ControlGroup:
    """Group of one sandbox, with a smaller one for each command."""

    def __init__(self, name: str, limits: SandboxLimits, *, file_bytes: int) -> None:
        """Make it.

        Args:
            name: unique name, which begins with the owner's `this_process()`.
            limits: bounds of its resources.
            file_bytes: memory for files in memory, in addition to `memory_mb`.
        """
        memory = (limits.memory_mb << 20) + file_bytes
        period = 100_000
        values = {
            "pids.max": limits.max_processes + _OWN_PROCESSES,
            "memory.max": memory,
            "memory.swap.max": 0,
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "cpu.max": f"{int(limits.cpus * period)} {period}",
            "cpu.cfs_quota_us": int(limits.cpus * period),
        }
        self._folders: dict[str, Path] = {}
        self._ended: set[Path] = set()
        """Groups of commands that have ended, but left processes."""
        for controller, parent in parents().items():
            folder = parent / f"{_PREFIX}{name}"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                for file, value in values.items():
                    if file.startswith(controller + ".") and (folder / file).exists():
                        (folder / file).write_text(str(value))
                self._folders[controller] = folder

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the controllers that this machine does not let this process use."""
        return tuple(name for name in CONTROLLERS if name not in self._folders)

    def files_to_join(self, command: str = "") -> list[str]:
        """Return the files to which a process writes its id to be in the group, or in the one of a command."""
        folders = set(self._folders.values())
        if command and (killable := self._killable(command)):
            killable.mkdir(exist_ok=True)
            folders = {folder for folder in folders if folder != killable.parent} | {killable}
        return [str(folder / "cgroup.procs") for folder in folders]

    def _killable(self, command: str) -> Path | None:
        return next((folder / command for folder in self._folders.values()), None)

    async def kill(self, command: str) -> bool:
        """Kill all processes of a command; return whether none is left."""
        folder = self._killable(command)
        if folder is None:
            return False
        for name, value in ("pids.max", "0"), ("cgroup.kill", "1"):  # so that no process starts another one
            if (folder / name).exists():
                (folder / name).write_text(value)
        for _ in range(200):
            if not _text(folder / "cgroup.procs").split():
                return True
            _kill_processes(folder)
            await asyncio.sleep(0.01)
        return False

    def remove_of(self, command: str) -> None:
        """Remove the groups of a command that has ended and of earlier ones, unless they have processes left."""
        if folder := self._killable(command):
            self._ended.add(folder)
        for ended in list(self._ended):
            with suppress(OSError):
                ended.rmdir()
            if not ended.exists():
                self._ended.remove(ended)

    async def remove(self) -> None:
        """Remove the group."""
        for folder in set(self._folders.values()):
            await remove_group(folder)


async def remove_group(folder: Path) -> bool:
    """Kill the processes of a group, and remove it and those in it; return whether it is gone."""
    for _ in range(200):
        if _remove_empty(folder):
            return True
        _kill_processes(folder)
        await asyncio.sleep(0.01)
    return False


def _kill_processes(folder: Path) -> None:
    for group, *_ in os.walk(folder):  # unlike rglob, it accepts that another process removes groups meanwhile
        for process in set(_text(f"{group}/cgroup.procs").split()) - {"0"}:  # 0: outside of this PID namespace
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def _remove_empty(folder: Path) -> bool:
    """Remove a group and those in it, if they have no processes; return whether it is gone."""
    try:
        for inner in folder.iterdir():
            if inner.is_dir():
                inner.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def group_prefix(owner: str) -> str | None:
    """Return the common prefix of the paths of an owner's groups; one controller's groups hold all processes."""
    return next((f"{parent}/{_PREFIX}{owner}:" for parent in parents().values()), None)


def left_groups() -> list[Path]:
    """Return the groups of all sandboxes of this machine that can be seen; `name_of` has their names."""
    return [folder for parent in set(parents().values()) for folder in parent.glob(f"{_PREFIX}*:*")]


def name_of(folder: Path) -> str:
    """Return the name of a group."""
    return folder.name.removeprefix(_PREFIX)


def _text(path: Path | str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
