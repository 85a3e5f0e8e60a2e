"""The interface of sandboxes: a `SandboxBackend` starts each `Sandbox`, which runs commands until it is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Self, TypeAlias

from rllm.errors import ConfigError, RolloutError
from rllm.registry import load_object, suggestion

Stream: TypeAlias = Literal["stdout", "stderr"]
Command: TypeAlias = str | Sequence[str]
"""A line for `sh -c`, or a program and its arguments."""

BACKENDS: dict[str, str] = {
    "local": "rllm.sandbox.bubblewrap:Bubblewrap",
    "podman": "rllm.sandbox.containers:Podman",
    "docker": "rllm.sandbox.containers:Docker",
    "kubernetes": "rllm.sandbox.kubernetes:Kubernetes",
}
"""Backends by name; packages add others by entry points of the group `rllm.sandboxes`."""

_GROUP = "rllm.sandboxes"


class SandboxError(RolloutError):
    """A sandbox that could not be started, or that has ended. Commands that fail do not raise it."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resources of a sandbox and of all its processes together."""

    cpus: float = 1.0
    """Number of CPU cores, or a fraction of one."""
    memory_mb: int = 2048
    """Mebibytes of memory. If files are in memory, too, processes and files share the sum of this and `disk_mb`."""
    disk_mb: int = 2048
    """Mebibytes of files that it may write."""
    max_processes: int = 256
    """Processes and threads."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """Result of a command."""

    exit_code: int
    """Exit code; minus the number of the signal that ended it."""
    stdout: str
    """Beginning and end of the output; if bytes are omitted between them, a line has their number."""
    stderr: str
    timed_out: bool = False
    """True if it was killed at its deadline, with all that it started."""
    num_dropped_bytes: int = 0
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether it succeeded."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def output(self) -> str:
        """Return stdout, and after it stderr."""
        return "\n".join(filter(None, (self.stdout.rstrip(), self.stderr.rstrip())))

    def failure(self, timeout_s: float) -> str:
        """Return how a command with this deadline failed, for a message."""
        return f"did not end within {timeout_s:g} seconds" if self.timed_out else f"exit code {self.exit_code}"


class Sandbox(ABC):
    """A running sandbox. It has no network but the routes opened to it; closing it ends everything in it.

    Use it in `async with`, which closes it.
    """

    id: str
    """Unique name."""
    workdir: str
    """Absolute path of the folder in which commands run."""

    @abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
        timeout_s: float | None = None,
        max_output_bytes: int = 1_000_000,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            command: see `Command`.
            cwd: its folder, by default `workdir`.
            env: variables in addition to the sandbox's own.
            input: its standard input.
            timeout_s: seconds after which it is killed; none by default.
            max_output_bytes: limit on the bytes kept of stdout, and of stderr: half from each end.
            on_output: called with each piece of output as it arrives, until the limit.

        Raises:
            SandboxError: if the sandbox has ended.
        """

    @abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or the content of a folder, from this machine to the sandbox. Missing folders are created.

        Raises:
            SandboxError: if the sandbox has ended, or the path cannot be written.
        """

    @abstractmethod
    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy a file, or the content of a folder, from the sandbox to this machine.

        Links that point out of the copied folder, devices and the like are left out: the sandbox is not trusted.

        Raises:
            SandboxError: if the sandbox has ended, the path does not exist, or its content exceeds `max_bytes`.
        """

    @abstractmethod
    async def open_route(self, url: str) -> str:
        """Let the sandbox reach one server by HTTP; return the URL under which it does, with the same path.

        Args:
            url: `http://HOST:PORT/...` as this process reaches it, such as the gateway's URL of a session.
        """

    async def check_running(self) -> None:
        """Raise `SandboxError` if the sandbox has ended."""
        await self.exec(["true"], cwd="/", timeout_s=60)

    async def snapshot(self) -> str:
        """Save the files and return an image that `SandboxBackend.start` accepts.

        Raises:
            SandboxError: if the backend cannot.
        """
        raise SandboxError(f"{type(self).__name__} has no snapshots")

    @abstractmethod
    async def close(self) -> None:
        """End all processes and delete all files. Idempotent; also called after errors and cancellation."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Image of a sandbox: a name that the backend knows, or a folder with a `Dockerfile` to build."""

    name: str | None = None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """Image and settings of a new sandbox, as `SandboxBackend.start` takes them."""

    image: str
    limits: SandboxLimits = SandboxLimits()
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Return the settings as a key; sandboxes of equal settings are interchangeable until they are used."""
        return self.image, self.limits, self.workdir, frozenset(self.env.items()), frozenset(self.mounts.items())


class SandboxBackend(ABC):
    """Starts sandboxes of one kind. Cheap to create: nothing runs before `start`."""

    name: str
    _is_prepared = False

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigError`, with the remedy, if sandboxes cannot be started on this machine."""

    async def image(self, source: ImageSource) -> str:
        """Return the image's name; a folder is built once, and found again by its content.

        Raises:
            SandboxError: if it cannot be built, with the end of the output; by default, no folder can.
        """
        if not source.name:
            raise SandboxError(
                f"sandbox={self.name} builds no images: push the image of {source.folder} to a registry that it can "
                "pull from, and name it in task.toml: [environment] docker_image"
            )
        return source.name

    async def start(
        self,
        image: str,
        *,
        limits: SandboxLimits = SandboxLimits(),
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
    ) -> Sandbox:
        """Start a sandbox.

        Args:
            image: a result of `image`, or of `Sandbox.snapshot`.
            limits: bounds of its resources.
            workdir: folder in which commands run, by default the image's, or `/app` if it has none.
            env: variables of all commands.
            mounts: folders of this machine that it sees read-only, by their absolute paths in the sandbox; for example
                a program that many sandboxes use. Backends on other machines upload them.

        Raises:
            SandboxError: if it does not start.
        """
        spec = SandboxSpec(image=image, limits=limits, workdir=workdir, env=env or {}, mounts=mounts or {})
        return await self.start_spec(spec)

    async def start_spec(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; see `start`."""
        if not self._is_prepared:
            self._is_prepared = True
            await self.prepare()
        return await self.launch(spec)

    async def prepare(self) -> None:
        """Prepare the machine for the first sandbox."""
        await self.remove_orphans()

    @abstractmethod
    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; raise `SandboxError` if it does not start."""

    async def remove_image(self, image: str) -> None:  # noqa: B027
        """Delete a result of `Sandbox.snapshot`, which otherwise lasts until this process ends."""

    async def remove_orphans(self) -> int:
        """Remove sandboxes that ended processes left, as the first `start` does; return their number."""
        return 0


def backend_names() -> list[str]:
    """Return the names of all backends, including backends from other packages."""
    return sorted({*BACKENDS, *(point.name for point in entry_points(group=_GROUP))})


def open_backend(name: str) -> SandboxBackend:
    """Return a backend by name.

    Raises:
        ConfigError: if the name is unknown, or the backend does not work on this machine; with the remedy.
    """
    plugins = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in BACKENDS and name not in plugins:
        known = backend_names()
        raise ConfigError(f"sandbox={name!r} is not known: {suggestion(name, known)}")
    kind = load_object(BACKENDS[name], kind="sandbox") if name in BACKENDS else plugins[name].load()
    backend: SandboxBackend = kind()
    backend.check()
    return backend
