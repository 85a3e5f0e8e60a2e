"""Sandboxes of bubblewrap, a program that makes Linux namespaces; no daemon and no images are needed.

A sandbox sees the programs of this machine, or a folder with a root file system, read-only. What it writes is in
memory: `/root`, `/tmp`, the working directory, and any other new folder. It has no network but its routes, no
capabilities, no way to make namespaces, and a user id of its own if this process runs as root. Its first process ends
when this one ends, for whatever reason, and all others end with the first.
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

from rllm._runtime.files import cache_folder, whole_folder
from rllm._runtime.ids import new_id
from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError, last_lines
from rllm.sandbox import namespaces
from rllm.sandbox.base import ExecResult, ImageSource, SandboxBackend, SandboxError, SandboxLimits, SandboxSpec, Stream
from rllm.sandbox.client import MARK, ClientSandbox, lock_of, reason_of, uncancelled
from rllm.sandbox.control_groups import KILL_ALL, ControlGroup, group_prefix, left_groups, name_of, remove_group
from rllm.sandbox.images import (
    ARCHIVE,
    HOST,
    HOST_FILES,
    LocalImage,
    Recipe,
    build,
    digest,
    host_files,
    new_archive,
    read_dockerfile,
    root_file_system,
    snapshots,
    warn_of_base,
)
from rllm.sandbox.owner import has_ended, run_after, this_process
from rllm.sandbox.route import Route

logger = logging.getLogger(__name__)
_SAVE = 'exec tar --anchored --no-wildcards "$@" -cf - -C / .'
_RESTORE = "exec tar --no-same-owner -xpf - -C /"
_START_TIMEOUT_S = 60.0
_END_S = 0.2
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INIT = ["/bin/sh", "-c", "echo || exit; exec >/dev/null 2>&1; while :; do sleep 3600; done"]
"""The line of output means that all is mounted; it cannot be written if the owner has ended meanwhile.

No signal of the sandbox ends process 1, which collects orphans.
"""
_SHARED_MEMORY = 64 << 20
_FIRST_USER, _NUM_USERS = 0x60000000, 0x0FFFFFFF
"""User ids that machines do not give to people or services, nor systemd to containers."""


class BubblewrapSandbox(ClientSandbox):
    """A process of bubblewrap; each command enters its namespaces."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        first_process: int,
        group: ControlGroup,
        *,
        base: str,
        workdir: str,
        env: Mapping[str, str],
        image_env: Mapping[str, str],
        read_only: Sequence[str],
        rlimits: Mapping[str, int],
    ) -> None:
        """Represent a sandbox that runs."""
        self._base = base
        self._image_env = image_env
        self._read_only = read_only
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
            "groups": self._group.files_to_join(env[MARK]),
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

    def command_ended(self, mark: str) -> None:
        self._group.remove_of(mark)

    async def snapshot(self) -> str:
        """Save the files that the sandbox has written, as an image that lasts until this process ends."""
        self._check_open()
        folder = snapshots() / new_id()
        await self.save(folder, workdir=self.workdir, env={})
        return str(folder)

    async def save(self, folder: Path, *, workdir: str | None, env: Mapping[str, str]) -> None:
        """Write an image: the files that the sandbox has written, and the settings that it was started with."""
        excluded = [f"--exclude=.{path}" for path in ("/dev", "/proc", *self._read_only)]
        archive = new_archive(folder, {"base": self._base, "workdir": workdir, "env": {**self._image_env, **env}})

        def write(stream: Stream, data: bytes) -> None:
            if stream == "stdout":
                archive.write(data)

        with archive:
            kept, ended = await self._transfer(_SAVE, excluded, on_output=write)
        if not ended.ok:
            raise SandboxError(f"no snapshot of sandbox {self.id}: {reason_of(kept, ended)}")

    async def restore(self, folder: Path) -> None:
        """Write an image's files."""
        with (folder / ARCHIVE).open("rb") as archive:
            kept, ended = await self._transfer(_RESTORE, [], stdin=archive)
        if not ended.ok:
            raise SandboxError(f"image {folder} cannot be unpacked: {reason_of(kept, ended)}")

    async def open_route(self, url: str) -> str:
        """Let the sandbox reach one server by HTTP."""
        self._check_open()
        route = await Route.open(self._first_process, url)
        self._routes.append(route)
        return route.url

    async def close(self) -> None:
        """End all processes; the files, which are in memory, end with them."""
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
    """Starts sandboxes of bubblewrap; see `images`."""

    name = "local"

    def check(self) -> None:
        """Raise `ConfigError` unless bubblewrap is installed and may make namespaces."""
        if reason := problem():
            raise ConfigError(f"sandbox=local: {reason}, or use sandbox=podman")

    async def image(self, source: ImageSource) -> str:
        """Return the image's name; a Dockerfile is followed with this machine's programs, see `images`."""
        if source.folder is None:
            return LocalImage.read(source.name or HOST).name
        folder = source.folder
        recipe = read_dockerfile(folder)
        warn_of_base(recipe.base)
        key = await in_thread(lambda: digest(folder), name="reading an image folder")
        image = cache_folder() / "sandboxes" / key
        async with lock_of(key):
            if not image.is_dir():
                await self._build(recipe, image)
        return str(image)

    async def _build(self, recipe: Recipe, image: Path) -> None:
        with whole_folder(image) as new:
            async with await self.launch(SandboxSpec(image=HOST, workdir=recipe.workdir or "/")) as sandbox:
                await build(recipe, sandbox)
                await sandbox.save(new, workdir=recipe.workdir, env=recipe.env)

    async def launch(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """Start a sandbox, and write the files of its image."""
        image = LocalImage.read(spec.image)
        sandbox = await self._launch(image, spec, spec.workdir or image.workdir or "/app")
        if image.archive:
            try:
                await sandbox.restore(image.archive)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _launch(self, image: LocalImage, spec: SandboxSpec, workdir: str) -> BubblewrapSandbox:
        name, limits = f"{this_process()}:{new_id()}", spec.limits
        is_host = image.base == HOST
        job, command = start_job(image.base, spec.mounts, file_bytes=limits.disk_mb << 20)
        binds = job["binds"]
        group = ControlGroup(name, limits, file_bytes=(limits.disk_mb << 20) + _SHARED_MEMORY)
        job["groups"] = group.files_to_join()
        job["init"] = [*_own_folder(workdir, binds, limits), "--chdir", "/", "--", *_INIT]
        try:
            process, first = await _started(job, [*command, "--as-pid-1", "--die-with-parent", "--new-session"])
        except BaseException:
            await uncancelled(group.remove())
            raise
        path = f"{_PATH}:{sys.base_prefix}/bin" if is_host and sys.base_prefix != "/usr" else _PATH
        own = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **image.env}
        return BubblewrapSandbox(
            name,
            process,
            first,
            group,
            base=image.base,
            workdir=workdir,
            env={**own, **spec.env},
            image_env=image.env,
            read_only=[target for _, target in binds],
            rlimits=_rlimits(limits, group.missing),
        )

    async def remove_image(self, image: str) -> None:
        """Delete a snapshot."""
        if Path(image).parent == snapshots():
            await in_thread(lambda: shutil.rmtree(image, ignore_errors=True), name="removing a snapshot")

    async def prepare(self) -> None:
        """Remove what ended processes left, and have this one's sandboxes killed when it has ended.

        Most end by themselves, but not those that bubblewrap has only half started.
        """
        if prefix := group_prefix(this_process()):
            run_after(this_process(), KILL_ALL, prefix)
        await super().prepare()

    async def remove_orphans(self) -> int:
        """Kill the processes in control groups of ended processes, and remove the groups."""
        left = {folder for folder in left_groups() if has_ended(name_of(folder))}
        return len({name_of(folder) for folder in left if await remove_group(folder)})


def start_job(base: str, mounts: Mapping[str, Path], *, file_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Return a job of `namespaces`, which lacks `init`, and the command that it runs: bubblewrap with an image's files.

    Args:
        base: `host`, or the path of a root file system.
        mounts: more files and folders of this machine, by their paths in the sandbox.
        file_bytes: limit of the files that are written anywhere but in `/dev/shm`.
    """
    binds, links, folders = host_files() if base == HOST else root_file_system(Path(base))
    binds += [(str(path.resolve()), target) for target, path in mounts.items()]
    options = [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "0", "--gid", "0"),
        *("--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--size", str(file_bytes), "--tmpfs", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--size", str(_SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(text for link in links for text in ("--symlink", *link)),
        *(text for folder in folders for text in ("--dir", folder)),
        *("--perms", "0700", "--dir", "/root", "--perms", "1777", "--dir", "/tmp", "--dir", "/run"),
    ]
    files = HOST_FILES if base == HOST else {}
    return {"do": "start", "binds": binds, "files": files, "uid": _other_user()}, [_program(), *options]


def _own_folder(path: str, binds: Sequence[tuple[str, str]], limits: SandboxLimits) -> list[str]:
    """Return options for a folder to which the sandbox may write, even if the image has that folder."""
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
def _warn_of_missing(missing: tuple[str, ...]) -> None:
    stead = {
        "memory": "sandbox.memory_mb limits each process",
        "pids": "max_processes limits each user",
        "cpu": "sandbox.cpus has no effect",
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
                *namespaces.arguments({**job, "pass_fds": [writer]}, [*command, "--info-fd", str(writer)]),
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
                reason = (await process.stderr.read(4000)).decode(errors="replace").strip() or "it was killed"
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


def _other_user() -> int | None:
    """Return a user id for one sandbox, which root may become; `None` for others, and in containers that lack it."""
    lines = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().strip().split("\n")]
    has_them = any(first <= _FIRST_USER and first + count >= _FIRST_USER + _NUM_USERS for first, _, count in lines)
    return _FIRST_USER + random.SystemRandom().randrange(_NUM_USERS) if os.geteuid() == 0 and has_them else None


def _program() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def problem(command: tuple[str, ...] = ("true",)) -> str | None:
    """Run a command in a sandbox of this machine's programs and this package; return why it fails, with the remedy."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed; install it (apt-get install bubblewrap)"
    package = Path(__file__).parents[1]
    job, start = start_job(HOST, {str(package): package}, file_bytes=1 << 20)
    job["init"] = ["--", *command]
    with no_fork_meanwhile():
        options = subprocess.run([_program(), "--help"], capture_output=True, text=True).stdout
        ended = subprocess.run(namespaces.arguments(job, start), capture_output=True, text=True, env={})
    if "--disable-userns" not in options:
        return "this bubblewrap is too old; use 0.8 or newer"
    if ended.returncode:
        readable = ", and make the files of this Python readable for all users (chmod -R o+rX)" if job["uid"] else ""
        return (
            f"bubblewrap cannot start a sandbox ({last_lines(ended.stderr)}); permit user namespaces by the sysctls "
            f"user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns=0{readable}"
        )
    return None
