"""Sandboxes in containers of podman or docker, by their command lines.

A container has no network but its routes, no new privileges, and the limits of `SandboxLimits`. Nothing outlives this
process: a small shell removes its containers and snapshots as soon as it has ended, however it ended, and the next
process on the machine removes what is left of others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rllm._runtime.ids import new_id
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError
from rllm.sandbox.base import ExecResult, ImageSource, SandboxBackend, SandboxError, SandboxLimits, SandboxSpec
from rllm.sandbox.client import ASK_TIMEOUT_S, ClientSandbox, ask, end_of, lock_of, uncancelled
from rllm.sandbox.images import digest
from rllm.sandbox.owner import has_ended, own_folder, run_after, this_process
from rllm.sandbox.route import Route

logger = logging.getLogger(__name__)

_LABEL = "rllm.owner"
_DISK_CHECK_S = 5.0
"""Seconds between checks of the sizes of all containers."""
_SIZE = "{{.Name}} {{.SizeRw}}"
_INIT = "while :; do sleep 3600; done"
"""The first process of a container. A shell that waits also collects processes whose parents have ended."""
_IN_NEW_FOLDER = 'mkdir -p -- "$1" && cd -- "$1" && shift && exec "$@"'

# A container may still be starting, so the script looks twice.
_REMOVE_ALL = """
empty=0
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  containers=$("$1" ps --all --quiet --filter "label=$2")
  images=$("$1" images --quiet --filter "label=$2")
  if [ "$containers$images" ]; then empty=0; else empty=$((empty + 1)); fi
  [ $empty -lt 2 ] || exit 0
  [ "$containers" ] && "$1" kill $containers
  [ "$containers" ] && "$1" rm --force --volumes $containers
  [ "$images" ] && "$1" rmi --force $images
  sleep 1
done
"""


class ContainerSandbox(ClientSandbox):
    """A container of `Podman` or `Docker`."""

    def __init__(
        self, backend: _Containers, name: str, workdir: str, max_disk_bytes: int, *, image_has_folder: bool
    ) -> None:
        """Represent a container that runs."""
        self._image_has_folder = image_has_folder
        self.id = name
        self.workdir = workdir
        self.max_disk_bytes = max_disk_bytes
        self._backend = backend
        self._routes: list[Route] = []

    def client(
        self, program: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: bool, as_root: bool = False
    ) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """Return the command line of `exec`, without values of variables: other users of the machine can read it."""
        options, client_env = _variables(env)
        if stdin:
            options.append("--interactive")
        if as_root:
            options += ["--user", "0"]
        if cwd == self.workdir and not self._image_has_folder:
            program, cwd = ["sh", "-c", _IN_NEW_FOLDER, "sh", cwd, *program], "/"
        return [self._backend.program, "exec", *options, "--workdir", cwd, self.id, *program], client_env

    def is_lost(self, result: ExecResult) -> bool:
        """Return whether the exit code may be the client's: docker ends with 1, podman with 125 or 255."""
        return result.exit_code in (125, 255, -9) or (result.exit_code == 1 and result.stderr.startswith("Error"))

    async def is_running(self) -> bool:
        """Return whether the container runs."""
        result = await self._backend.run("container", "inspect", "--format", "{{.State.Running}}", self.id)
        return result.stdout.strip() == "true"

    async def open_route(self, url: str) -> str:
        """Let the container reach one server by HTTP, see `rllm.sandbox.route`."""
        self._check_open()
        result = await self._backend.run("container", "inspect", "--format", "{{.State.Pid}}", self.id)
        if not result.ok or result.stdout.strip() == "0":
            raise SandboxError(f"sandbox {self.id} has ended: {end_of(result)}")
        route = await Route.open(int(result.stdout), url)
        self._routes.append(route)
        return route.url

    async def snapshot(self) -> str:
        """Save the files as an image, which lasts until `SandboxBackend.remove_image` or the end of this process."""
        self._check_open()
        image = f"localhost/rllm-snapshot:{new_id()}"
        result = await self._backend.run("commit", "--change", f"WORKDIR {self.workdir}", self.id, image)
        if not result.ok:
            raise SandboxError(f"no snapshot of sandbox {self.id}: {end_of(result)}")
        return image

    async def close(self) -> None:
        """Remove the container with all its processes and files."""
        self.end_reason = self.end_reason or "it was closed"
        self._backend.sandboxes.pop(self.id, None)
        await uncancelled(self._remove())

    async def _remove(self) -> None:
        for route in self._routes:
            await route.close()
        await self._backend.remove(self.id)


class _Containers(SandboxBackend):
    """Parts common to podman and docker."""

    program: str
    other: ClassVar[str]
    """Advice for a program that does not work."""

    def __init__(self) -> None:
        """Start nothing."""
        self.sandboxes: dict[str, ContainerSandbox] = {}
        self._runtime: list[str] = []
        self._folders: dict[str, str] = {}
        self._watch: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise `ConfigError` unless the program is installed and works."""
        if not shutil.which(self.program):
            raise ConfigError(f"sandbox={self.name}: {self.program} is not installed; install it, or {self.other}")
        try:
            info = subprocess.run([self.program, "info"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"sandbox={self.name}: `{self.program} info` did not answer within {ASK_TIMEOUT_S:g} s; {self.other}"
            ) from error
        if info.returncode:
            reason = info.stderr.strip().rpartition("\n")[2]
            raise ConfigError(
                f"sandbox={self.name}: `{self.program} info` fails ({reason}); repair it, or {self.other}"
            )

    async def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float | None = ASK_TIMEOUT_S,
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        """Run podman or docker."""
        command = [self.program, *arguments]
        return await ask(command, env=env, cwd=cwd, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def image(self, source: ImageSource) -> str:
        """Return the image's name, after a pull or a build if this machine does not have it."""
        if source.folder is None:
            name = source.name or ""
            if not (await self.run("image", "inspect", "--", name)).ok:
                logger.info("pulling the image %s", name)
                await self._make("pull", "--", name, what=f"image {name!r} is not on this machine and cannot be pulled")
            return name
        folder = source.folder
        if not (folder / "Dockerfile").is_file():
            raise SandboxError(f"{folder} has no Dockerfile")
        name = f"localhost/rllm-image:{await in_thread(lambda: digest(folder), name='reading an image folder')}"
        async with lock_of(name):
            if not (await self.run("image", "inspect", name)).ok:
                logger.info("building the image of %s", folder)
                await self._make("build", "--tag", name, str(folder), what=f"the image of {folder} cannot be built")
        return name

    async def _make(self, *arguments: str, what: str) -> None:
        result = await self.run(*arguments, timeout_s=None, max_output_bytes=8000)
        if not result.ok:
            *before, cause = end_of(result).split("\n")
            raise SandboxError("\n".join([f"{what}: {cause}", *before]))

    async def prepare(self) -> None:
        """Remove what ended processes left, and have what this one leaves removed as soon as it has ended."""
        run_after(this_process(), _REMOVE_ALL, self.program, f"{_LABEL}={this_process()}")
        await super().prepare()

    async def launch(self, spec: SandboxSpec) -> ContainerSandbox:
        """Start a container."""
        if spec.image not in self._folders:
            result = await self.run("image", "inspect", "--format", "{{.Config.WorkingDir}}", "--", spec.image)
            if not result.ok:
                raise SandboxError(f"image {spec.image!r} is not on this machine: {end_of(result)}")
            self._folders[spec.image] = result.stdout.strip()
        image_folder = self._folders[spec.image]
        name = f"rllm-{new_id()}"
        folder = spec.workdir or image_folder or "/app"
        try:
            await self._run(name, spec)
        except BaseException:
            await uncancelled(self.remove(name))
            raise
        max_disk_bytes = spec.limits.disk_mb << 20
        sandbox = ContainerSandbox(self, name, folder, max_disk_bytes, image_has_folder=folder == image_folder)
        self.sandboxes[name] = sandbox
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_disks())
        return sandbox

    async def _run(self, name: str, spec: SandboxSpec) -> None:
        options, client_env = _variables(spec.env)
        for target, folder in spec.mounts.items():
            options += ["--mount", f"type=bind,source={folder.resolve()},target={target},readonly"]
        command = [
            *("run", "--detach", "--rm", "--name", name, "--label", f"{_LABEL}={this_process()}"),
            *("--network", "none", "--pull", "never", "--security-opt", "no-new-privileges"),
            *self.limit_options(spec.limits),
            *options,
            *("--entrypoint", "sh", spec.image, "-c", _INIT),
        ]
        # podman's monitor writes a file `oom` to its current folder if the container's memory is used up.
        cwd = await in_thread(own_folder, name="making a temporary folder")
        result = await self.run(*self._runtime, *command, env=client_env, cwd=cwd)
        if not result.ok and "crun" in result.stderr and shutil.which("runc"):
            # crun refuses machines with both versions of control groups.
            await self.remove(name)
            self._runtime = ["--runtime", "runc"]
            result = await self.run(*self._runtime, *command, env=client_env, cwd=cwd)
        if not result.ok:
            raise SandboxError(f"a sandbox of {spec.image} cannot be started: {end_of(result)}")

    def limit_options(self, limits: SandboxLimits) -> list[str]:
        """Return options of `run`. Few storage drivers limit a container's files, so `_watch_disks` does."""
        # The defaults of these two may be above what this machine allows.
        most_files, most_processes = _at_most(resource.RLIMIT_NOFILE, 65536), _at_most(resource.RLIMIT_NPROC, 32768)
        bounds = {"nofile": most_files, "nproc": most_processes, "fsize": limits.disk_mb << 20}
        return [
            *("--cpus", str(limits.cpus), "--pids-limit", str(limits.max_processes)),
            *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
            *(text for name, most in bounds.items() for text in ("--ulimit", f"{name}={most}:{most}")),
        ]

    async def _watch_disks(self) -> None:
        while self.sandboxes:
            await asyncio.sleep(_DISK_CHECK_S)
            sizes = await self.run("container", "inspect", "--size", "--format", _SIZE, *self.sandboxes)
            for line in sizes.stdout.split("\n"):
                name, _, size = line.strip().lstrip("/").partition(" ")
                sandbox = self.sandboxes.get(name)
                if sandbox and size.isdecimal() and int(size) > sandbox.max_disk_bytes:
                    await sandbox.end(f"it wrote more than sandbox.disk_mb={sandbox.max_disk_bytes >> 20}")

    async def remove(self, *names: str) -> None:
        """Remove containers; those that do not exist are skipped."""
        result = await self.run("rm", "--force", "--volumes", *self.remove_options, *names)
        if not result.ok and "no such container" not in result.stderr.lower():
            logger.warning("sandboxes %s may still exist: %s", ", ".join(names), end_of(result))

    remove_options: ClassVar[Sequence[str]] = ()

    async def remove_image(self, image: str) -> None:
        """Delete a snapshot."""
        await self.run("rmi", "--force", image)
        self._folders.pop(image, None)

    async def remove_orphans(self) -> int:
        """Remove containers and snapshots of ended processes; return the number of containers."""
        containers = await self._left("container", "ps", "--all")
        if containers:
            await self.remove(*containers)
        if images := await self._left("image", "images"):
            await self.run("rmi", "--force", *images)
        return len(containers)

    async def _left(self, kind: str, *listing: str) -> list[str]:
        """Return the ids of an ended process's containers or images."""
        ids = (await self.run(*listing, "--quiet", "--filter", f"label={_LABEL}")).stdout.split()
        if not ids:
            return []
        owners = f'{{{{.Id}}}} {{{{index .Config.Labels "{_LABEL}"}}}}'
        found = await self.run(kind, "inspect", "--format", owners, *dict.fromkeys(ids))
        pairs = [line.split() for line in found.stdout.split("\n")]
        return [pair[0] for pair in pairs if len(pair) == 2 and has_ended(pair[1])]


class Podman(_Containers):
    """Containers of podman."""

    name = "podman"
    program = "podman"
    other = "use sandbox=local or sandbox=docker"
    remove_options = ("--time", "0")

    def limit_options(self, limits: SandboxLimits) -> list[str]:
        """Return options of `run`; without them podman would pass on this process's proxy variables.

        Volumes of an image are not measured, so their files are in the container's own layer.
        """
        return [*super().limit_options(limits), "--http-proxy=false", "--image-volume=ignore"]


class Docker(_Containers):
    """Containers of docker."""

    name = "docker"
    program = "docker"
    other = "use sandbox=local or sandbox=podman"


def _variables(env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return options that set variables in a container, and the client's own variables, which have the values.

    A variable that this process also has is the client's too, such as `PATH`, so its value is in the option.
    """
    options = [text for name in env for text in ("--env", f"{name}={env[name]}" if name in os.environ else name)]
    return options, {**env, **os.environ}


def _at_most(kind: int, most: int) -> int:
    """Return a number within this process's own limit."""
    limit = resource.getrlimit(kind)[1]
    return most if limit == resource.RLIM_INFINITY else min(limit, most)
