"""Sandboxes of bubblewrap, a program that makes Linux namespaces; no daemon and no images are needed.

A sandbox sees the programs of this machine, or a folder with a root file system, read-only. What it writes is in
memory: `/root`, `/tmp`, the working directory, and any other new folder. It has no network but its routes, no
capabilities, no way to make namespaces, and a user id of its own where this process is root's. Its first process ends
with this one, by whatever means, and all others end with the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rllm._runtime.ids import new_id
from rllm._runtime.process import no_fork_meanwhile
from rllm.errors import ConfigError
from rllm.sandbox import namespaces
from rllm.sandbox.base import ExecResult, ImageSource, SandboxBackend, SandboxError, SandboxLimits
from rllm.sandbox.client import _MARK, ClientSandbox, uncancelled
from rllm.sandbox.control_groups import ControlGroup, left_groups, name_of, remove_empty
from rllm.sandbox.dockerfile import NAME as DOCKERFILE
from rllm.sandbox.dockerfile import build, read_dockerfile
from rllm.sandbox.owner import has_ended, this_process
from rllm.sandbox.route import Route

logger = logging.getLogger(__name__)

HOST = "host"
"""Image: the programs of this machine."""
_LIMITS = SandboxLimits()
_START_TIMEOUT_S = 60.0
_END_S = 0.2
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INIT = ["/bin/sh", "-c", "echo; exec sleep infinity"]
"""The line of output means that all is mounted."""
_HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_SETTINGS = (
    *("alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types"),
    *("nsswitch.conf", "os-release", "pki", "protocols", "services", "ssl"),
)
"""Of `/etc`: nothing that is private to this machine."""
_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}
_OWN = frozenset({"dev", "proc", "sys", "tmp", "run", "root", "home"})
"""Folders in `/` that no image gives a sandbox."""
_SHARED_MEMORY = 64 << 20
_FIRST_USER, _NUM_USERS = 0x60000000, 0x0FFFFFFF
"""User ids that no machine gives to people or services, and systemd to no container."""


class BubblewrapSandbox(ClientSandbox):
    """A process of bubblewrap; each command enters its namespaces."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        first_process: int,
        group: ControlGroup,
        *,
        workdir: str,
        env: Mapping[str, str],
        rlimits: Mapping[str, int],
    ) -> None:
        """Represent a sandbox that runs."""
        self.id = name
        self.workdir = workdir
        self._process = process
        self._first_process = first_process
        self._group = group
        self._env = env
        self._rlimits = rlimits
        self._routes: list[Route] = []

    def client(
        self, program: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: bool, as_root: bool = False
    ) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """Return the command line that enters the namespaces."""
        job = {
            "do": "exec",
            "pid": self._first_process,
            "groups": self._group.files_to_join(env[_MARK]),
            "rlimits": self._rlimits,
            "cwd": cwd,
        }
        return namespaces.arguments(job, program), namespaces.variables({**self._env, **env})

    def is_lost(self, result: ExecResult) -> bool:
        """Return whether the program that enters may have failed."""
        return result.exit_code in (namespaces.FAILED, -signal.SIGKILL)

    async def is_running(self) -> bool:
        """Return whether bubblewrap runs; it ends a moment after the sandbox's processes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
        return self._process.returncode is None

    async def _kill(self, mark: str, *, as_root: bool = False) -> None:
        """Kill a command and all that it started; without control groups, the whole sandbox."""
        if not await self._group.kill(mark):
            await self.end("a command had to be killed at its deadline, which needs control groups")

    async def open_route(self, url: str) -> str:
        """Let the sandbox reach one server by HTTP."""
        self._check_open()
        route = await Route.open(self._first_process, url)
        self._routes.append(route)
        return route.url

    async def close(self) -> None:
        """End all processes; the files were in memory."""
        self.end_reason = self.end_reason or "it was closed"
        await uncancelled(self._close())

    async def _close(self) -> None:
        for route in self._routes:
            await route.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first_process, signal.SIGKILL)  # it ends after all the others, and bubblewrap after it
        await self._process.wait()
        await self._group.remove()


class Bubblewrap(SandboxBackend):
    """Starts sandboxes of bubblewrap. Images are `host`, and folders with a root file system."""

    name = "local"

    def check(self) -> None:
        """Raise `ConfigError` unless bubblewrap is installed and may make namespaces."""
        _check_machine()

    async def image(self, source: ImageSource) -> str:
        """Return the name: `host`, or the path of a folder with a root file system or a Dockerfile.

        A Dockerfile's steps are taken in each sandbox, with the programs of this machine instead of its base image.
        """
        if source.folder is not None:
            recipe = read_dockerfile(source.folder)
            _warn_of_base(recipe.base)
            return str(source.folder)
        name = source.name or HOST
        if name != HOST and not (Path(name) / "bin/sh").exists():
            raise SandboxError(f"image {name!r}: sandbox=local has `host`, and folders with a root file system")
        return name

    async def start(
        self,
        image: str,
        *,
        limits: SandboxLimits = _LIMITS,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
    ) -> BubblewrapSandbox:
        """Start a sandbox."""
        if (Path(image) / DOCKERFILE).is_file():
            return await self._start_built(Path(image), limits=limits, workdir=workdir, env=env, mounts=mounts)
        name = f"{this_process()}:{new_id()}"
        workdir = workdir or "/app"
        await self.image(ImageSource(name=image))
        binds, links, folders = _host() if image == HOST else _root_file_system(Path(image))
        binds += [(str(path.resolve()), target) for target, path in (mounts or {}).items()]
        options = [
            *(
                "--unshare-all",
                "--unshare-user",
                "--disable-userns",
                "--uid",
                "0",
                "--gid",
                "0",
                "--hostname",
                "sandbox",
            ),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--size", str(limits.disk_mb << 20), "--tmpfs", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--size", str(_SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *(text for link in links for text in ("--symlink", *link)),
            *(text for folder in folders for text in ("--dir", folder)),
            *("--perms", "0700", "--dir", "/root", "--perms", "1777", "--dir", "/tmp", "--dir", "/run"),
        ]
        group = ControlGroup(name, limits, file_bytes=(limits.disk_mb << 20) + _SHARED_MEMORY)
        rlimits = _rlimits(limits, group.missing)
        try:
            process, first = await _started(
                {
                    "do": "start",
                    "groups": group.files_to_join(),
                    "rlimits": {},
                    "binds": binds,
                    "files": _FILES if image == HOST else {},
                    "uid": _FIRST_USER + random.SystemRandom().randrange(_NUM_USERS) if os.geteuid() == 0 else None,
                    "init": [*_own_folder(workdir, binds, limits), "--chdir", "/", "--", *_INIT],
                },
                [_program(), *options],
            )
        except BaseException:
            await uncancelled(group.remove())
            raise
        path = f"{_PATH}:{sys.base_prefix}/bin" if image == HOST and sys.base_prefix != "/usr" else _PATH
        own = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"}
        return BubblewrapSandbox(
            name, process, first, group, workdir=workdir, env={**own, **(env or {})}, rlimits=rlimits
        )

    async def _start_built(
        self,
        folder: Path,
        *,
        limits: SandboxLimits,
        workdir: str | None,
        env: Mapping[str, str] | None,
        mounts: Mapping[str, Path] | None,
    ) -> BubblewrapSandbox:
        """Start a sandbox and take the steps of a Dockerfile in it."""
        recipe = read_dockerfile(folder)
        sandbox = await self.start(
            HOST, limits=limits, workdir=workdir or recipe.workdir, env={**recipe.env, **(env or {})}, mounts=mounts
        )
        try:
            await build(recipe, sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def remove_orphans(self) -> int:
        """Remove control groups of ended processes, whose sandboxes have ended with them; return their number."""
        names = {name_of(folder) for folder in left_groups() if has_ended(name_of(folder)) and remove_empty(folder)}
        return len(names)


def _host() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return what is bound (source and target), the links, and the new folders of the image `host`."""
    root = Path("/")
    there = [path for name in _HOST_FOLDERS if (path := root / name).exists()]
    links = [(str(path.readlink()), str(path)) for path in there if path.is_symlink()]
    settings = [path for name in _HOST_SETTINGS if (path := root / "etc" / name).exists()]
    prefixes = {Path(sys.base_prefix), Path(sys.prefix)}  # of the interpreter and its packages
    bound = [path for path in there if not path.is_symlink()] + settings
    bound += sorted(path for path in prefixes if not any(path.is_relative_to(folder) for folder in there))
    return [(str(path), str(path)) for path in bound], links, ["/etc", "/var", "/var/tmp", "/opt", "/home"]


def _root_file_system(image: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return what is bound, the links, and the new folders of an image; its empty folders can be written to."""
    binds, links, folders = [], [], []
    for path in sorted(image.iterdir()):
        target = f"/{path.name}"
        if path.name in _OWN:
            continue
        if path.is_symlink():
            links.append((str(path.readlink()), target))
        elif path.is_dir() and not any(path.iterdir()):
            folders.append(target)
        else:
            binds.append((str(path), target))
    return binds, links, folders


def _own_folder(path: str, binds: Sequence[tuple[str, str]], limits: SandboxLimits) -> list[str]:
    """Return options for a folder to which the sandbox may write, also where the image has one."""
    is_read_only = any(PurePosixPath(path).is_relative_to(target) for _, target in binds)
    return ["--size", str(limits.disk_mb << 20), "--tmpfs", path] if is_read_only else ["--dir", path]


def _rlimits(limits: SandboxLimits, missing: tuple[str, ...]) -> dict[str, int]:
    """Return limits of each process; they stand in for control groups that this process may not make."""
    if missing:
        _warn_of_missing(missing)
    values = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": limits.disk_mb << 20}
    if "memory" in missing:
        values["RLIMIT_AS"] = limits.memory_mb << 20
    if "pids" in missing:
        values["RLIMIT_NPROC"] = limits.max_processes
    return values


@functools.cache
def _warn_of_base(base: str) -> None:
    logger.warning("sandbox=local: the programs of this machine stand for the image %s; sandbox=podman uses it", base)


@functools.cache
def _warn_of_missing(missing: tuple[str, ...]) -> None:
    stead = {
        "memory": "memory_mb holds for each process",
        "pids": "max_processes for each user",
        "cpu": "cpus does not",
    }
    logger.warning(
        "sandbox=local: this user may not make control groups of %s, so %s; run as root, or with `systemd-run --user "
        "--scope -p Delegate=yes`",
        ", ".join(missing),
        ", ".join(stead[name] for name in missing),
    )


async def _started(job: Mapping[str, Any], command: Sequence[str]) -> tuple[asyncio.subprocess.Process, int]:
    """Start bubblewrap; return its process, and the id of the sandbox's first one."""
    reader, writer = os.pipe()
    try:
        with no_fork_meanwhile():
            process = await asyncio.create_subprocess_exec(
                *namespaces.arguments(job, [*command, "--info-fd", str(writer)]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[writer],
                env={},
                start_new_session=True,  # Ctrl-C is for this process, which then closes its sandboxes
            )
        os.close(writer)
        writer = -1
        assert process.stdout
        assert process.stderr
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
            if not ready:
                reason = (await process.stderr.read(4000)).decode(errors="replace").strip()
                raise SandboxError(f"bubblewrap did not start a sandbox: {reason}")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await uncancelled(process.wait())
            raise
        return process, int(json.loads(os.read(reader, 4096))["child-pid"])
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _program() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def _check_machine() -> None:
    if not shutil.which("bwrap"):
        raise ConfigError(
            "sandbox=local: bubblewrap is not installed; apt-get install bubblewrap, or use sandbox=podman"
        )
    options = subprocess.run([_program(), "--help"], capture_output=True, text=True).stdout
    if "--disable-userns" not in options:
        raise ConfigError("sandbox=local: this bubblewrap is too old; use 0.8 or newer, or sandbox=podman")
    command = [_program(), "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true"]
    user = _FIRST_USER if os.geteuid() == 0 else None
    ended = subprocess.run(command, capture_output=True, text=True, user=user)
    if ended.returncode:
        raise ConfigError(
            f"sandbox=local: this machine permits no user namespaces ({ended.stderr.strip()}); set the sysctls "
            "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns=0, or use sandbox=podman"
        )
