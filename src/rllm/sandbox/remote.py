"""Sandboxes of the services E2B, Daytona and Modal, whose keys and addresses are in the services' own variables.

A service runs a shell line, and writes and reads a file; all else is done in the sandbox, with `sh`, `tar`, `base64`
and `timeout`. Output arrives when a command has ended. A sandbox ends after an hour, even after a `kill -9` of this
process. Written for the APIs of e2b 2.63, daytona 0.226 and modal 1.6, and tested only against scripted servers.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import math
import os
import shlex
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import httpx

from rllm._runtime.ids import new_id
from rllm._runtime.threads import in_thread
from rllm.errors import ConfigError, MissingDependencyError, last_lines
from rllm.sandbox import client
from rllm.sandbox.base import (
    Command,
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxLimits,
    SandboxSpec,
    Stream,
)
from rllm.sandbox.files import holds_folder, max_archive_bytes, pack, unpack
from rllm.sandbox.route import gateway_address, public_route

logger = logging.getLogger(__name__)
_LIFETIME_S = 3600
_START_TIMEOUT_S = 300.0
_EXEC = """
folder=$(mktemp -d) && cd {cwd} || exit 1
env {variables} {deadline} {program} <{stdin} >"$folder/stdout" 2>"$folder/stderr"
code=$?; echo $code
if [ $code = 137 ]; then sh -c {kill} sh {mark}; fi
for name in stdout stderr; do
  size=$(($(wc -c <"$folder/$name"))); echo $size
  {{ if [ $size -le {most} ]; then cat "$folder/$name"
    else head -c {head} "$folder/$name"; tail -c {tail} "$folder/$name"; fi; }} | base64 | tr -d '\\n'; echo
done
rm -rf "$folder"
"""


class RemoteSandbox(Sandbox):
    """A sandbox of a service."""

    def __init__(self, backend: RemoteBackend, id: str, handle: Any) -> None:
        """Represent a sandbox that runs; the handle is the service's own."""
        self.id = id
        self.workdir = "/"
        self._backend = backend
        self._handle = handle

    async def shell(self, script: str, *arguments: str, redirect: str = "") -> str:
        """Run a script as root; return its output, or raise `SandboxError` if it fails."""
        line = shlex.join(["sh", "-c", script, "sh", *arguments])
        code, output = await self._backend.shell(self._open(), f"{line} {redirect}")
        if code:
            raise SandboxError(f"sandbox {self.id}: exit code {code}: {last_lines(output)}")
        return output

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
        """Run a command to its end; its deadline is in whole seconds."""
        mark, began, half = new_id(), time.monotonic(), max_output_bytes // 2
        stdin = f"/tmp/.{mark}" if input else "/dev/null"
        if input:
            await self._backend.write(self._open(), stdin, input.encode())
        script = _EXEC.format(
            cwd=shlex.quote(cwd or self.workdir),
            variables=shlex.join(f"{name}={value}" for name, value in {**(env or {}), client.MARK: mark}.items()),
            deadline=f"timeout -s KILL {math.ceil(timeout_s)}" if timeout_s else "",
            program=shlex.join(["sh", "-c", command] if isinstance(command, str) else command),
            stdin=stdin,
            kill=shlex.quote(client.KILL),
            mark=mark,
            most=max_output_bytes,
            head=half,
            tail=max_output_bytes - half,
        )
        code, *lines = (await self.shell(script)).split("\n")
        texts, num_dropped = [], 0
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream, size, encoded in zip(streams, lines[0::2], lines[1::2], strict=False):
            kept = base64.b64decode(encoded)
            if on_output and kept:
                on_output(stream, kept)
            num_dropped += (dropped := int(size) - len(kept))
            gap = client.GAP.format(dropped).encode() if dropped else b""
            texts.append((kept[:half] + gap + kept[half:]).decode(errors="replace"))
        duration_s = time.monotonic() - began
        return ExecResult(
            exit_code=client.with_signal(int(code)),
            stdout=texts[0],
            stderr=texts[1],
            timed_out=code in ("124", "137") and timeout_s is not None and duration_s >= timeout_s,
            num_dropped_bytes=num_dropped,
            duration_s=duration_s,
        )

    async def upload(self, source: Path, target: str) -> None:
        archive, path, packed = io.BytesIO(), PurePosixPath(target), f"/tmp/.{new_id()}"
        is_folder = await in_thread(source.is_dir, name="looking for files to upload")
        await in_thread(lambda: pack(source, archive, name=path.name), name="packing files for a sandbox")
        await self._backend.write(self._open(), packed, archive.getvalue())
        await self.shell(client.UNPACK, str(path if is_folder else path.parent), redirect=f"<{packed} && rm {packed}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        packed = f"/tmp/.{new_id()}"
        size = await self.shell(client.PACK, source, redirect=f">{packed} && wc -c <{packed}")
        if int(size) > max_archive_bytes(max_bytes):
            raise SandboxError(f"{source} in sandbox {self.id} has more than max_bytes={max_bytes:,} bytes")
        content = await self._backend.read(self._open(), packed)
        archive = io.BytesIO(content)
        await in_thread(
            lambda: unpack(archive, target, into_folder=holds_folder(archive), max_bytes=max_bytes),
            name="unpacking files of a sandbox",
        )

    async def open_route(self, url: str) -> str:
        return public_route(url, self._backend.name)

    async def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                await client.uncancelled(self._backend.delete(handle))
            except SandboxError as error:  # it may have ended by itself
                logger.warning("sandbox %s may still exist: %s", self.id, error)

    def _open(self) -> Any:
        """Return the handle; raise `SandboxError` if the sandbox was closed."""
        if self._handle is None:
            raise SandboxError(f"sandbox {self.id} has ended: it was closed")
        return self._handle


class RemoteBackend(SandboxBackend):
    """A service; its methods raise `SandboxError`."""

    variables: ClassVar[tuple[str, ...]]
    """Variables with its keys."""

    @abstractmethod
    async def create(self, image: str, limits: SandboxLimits, env: Mapping[str, str]) -> tuple[str, Any]:
        """Start a sandbox that reaches only the public gateway; return its id and its handle."""

    @abstractmethod
    async def shell(self, handle: Any, line: str) -> tuple[int, str]:
        """Run a line as root; return its exit code and output."""

    @abstractmethod
    async def write(self, handle: Any, path: str, content: bytes) -> None:
        """Write a file."""

    @abstractmethod
    async def read(self, handle: Any, path: str) -> bytes:
        """Read a file."""

    @abstractmethod
    async def delete(self, handle: Any) -> None:
        """End a sandbox."""

    def check(self) -> None:
        if missing := [name for name in self.variables if not os.environ.get(name)]:
            raise ConfigError(f"sandbox={self.name}: set {' and '.join(missing)} to the key of your account")
        gateway_address()

    async def launch(self, spec: SandboxSpec) -> RemoteSandbox:
        sandbox = RemoteSandbox(self, *await self.create(spec.image, spec.limits, spec.env))
        try:
            sandbox.workdir = (await sandbox.shell(client.FIND_FOLDER, spec.workdir or "")).strip()
            for target, folder in spec.mounts.items():
                await sandbox.upload(folder, target)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


async def _send(method: str, url: str, **arguments: Any) -> bytes:
    # The answer to a command comes when that has ended.
    timeout = httpx.Timeout(client.TRANSFER_TIMEOUT_S, read=_LIFETIME_S)
    try:
        async with httpx.AsyncClient(timeout=timeout) as http:
            response = await http.request(method, url, **arguments)
    except httpx.HTTPError as error:
        raise SandboxError(f"{method} {url}: {error!r}") from error
    if response.is_error:
        raise SandboxError(f"{method} {url}: {response.status_code} {response.text[:500]}")
    return response.content


class E2B(RemoteBackend):
    """E2B. An image is the name of a template, which also has the limits; a handle is the response to its creation."""

    name = "e2b"
    variables = ("E2B_API_KEY",)

    async def create(self, image: str, limits: SandboxLimits, env: Mapping[str, str]) -> tuple[str, Any]:
        address = gateway_address()
        network = {"denyOut": ["0.0.0.0/0"], "allowOut": [f"{address[0]}/32"] if address else []}
        request = {"templateID": image, "timeout": _LIFETIME_S, "envVars": dict(env), "network": network}
        created = json.loads(await self._api("POST", "/sandboxes", json=request))
        return created["sandboxID"], created

    async def shell(self, handle: Any, line: str) -> tuple[int, str]:
        # A stream of the Connect protocol: each message has a byte of flags and four of its size before it.
        request = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", line]}}).encode()
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        content = b"\0" + len(request).to_bytes(4, "big") + request
        frames = await self._envd(handle, "POST", "/process.Process/Start", content=content, headers=headers)
        output, code = b"", None
        while frames:
            end = 5 + int.from_bytes(frames[1:5], "big")
            message, frames = json.loads(frames[5:end] or b"{}"), frames[end:]
            if "error" in message:
                raise SandboxError(f"sandbox {handle['sandboxID']}: {message['error']}")
            event = message.get("event", {})
            output += b"".join(map(base64.b64decode, event.get("data", {}).values()))
            code = event["end"].get("exitCode", 0) if "end" in event else code
        if code is None:
            raise SandboxError(f"sandbox {handle['sandboxID']} ended while a command ran")
        return code, output.decode(errors="replace")

    async def write(self, handle: Any, path: str, content: bytes) -> None:
        await self._envd(handle, "POST", "/files", params=_file(path), files={"file": (path, content)})

    async def read(self, handle: Any, path: str) -> bytes:
        return await self._envd(handle, "GET", "/files", params=_file(path))

    async def delete(self, handle: Any) -> None:
        await self._api("DELETE", f"/sandboxes/{handle['sandboxID']}")

    async def _api(self, method: str, path: str, **arguments: Any) -> bytes:
        url = os.environ.get("E2B_API_URL") or f"https://api.{os.environ.get('E2B_DOMAIN') or 'e2b.app'}"
        return await _send(method, url + path, headers={"X-API-KEY": os.environ["E2B_API_KEY"]}, **arguments)

    async def _envd(self, handle: Any, method: str, path: str, **arguments: Any) -> bytes:
        domain = handle.get("domain") or os.environ.get("E2B_DOMAIN") or "e2b.app"
        url = os.environ.get("E2B_SANDBOX_URL") or f"https://49983-{handle['sandboxID']}.{domain}"
        headers = {
            "X-Access-Token": handle.get("envdAccessToken") or "",
            "Authorization": f"Basic {base64.b64encode(b'root:').decode()}",
            **arguments.pop("headers", {}),
        }
        return await _send(method, url + path, headers=headers, **arguments)


def _file(path: str) -> dict[str, str]:
    return {"path": path, "username": "root"}


class Daytona(RemoteBackend):
    """Daytona. An image is one that it can pull; a handle is its description of a sandbox."""

    name = "daytona"
    variables = ("DAYTONA_API_KEY",)

    async def create(self, image: str, limits: SandboxLimits, env: Mapping[str, str]) -> tuple[str, Any]:
        address = gateway_address()
        request = {
            "buildInfo": {"dockerfileContent": f"FROM {image}\n"},
            "env": dict(env),
            "cpu": math.ceil(limits.cpus),
            "memory": math.ceil(limits.memory_mb / 1024),
            "disk": math.ceil(limits.disk_mb / 1024),
            "autoStopInterval": 0,
            "ttlMinutes": _LIFETIME_S // 60,
            **({"networkAllowList": f"{address[0]}/32"} if address else {"networkBlockAll": True}),
        }
        created = json.loads(await self._api("POST", "/sandbox", json=request))
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            while created["state"] != "started":
                if created["state"] in ("error", "build_failed", "destroyed") or time.monotonic() > deadline:
                    reason = created.get("errorReason") or f"it is {created['state']}"
                    raise SandboxError(f"a sandbox of {image} cannot be started: {reason}")
                await asyncio.sleep(0.5)
                created = json.loads(await self._api("GET", f"/sandbox/{created['id']}"))
        except BaseException:
            await client.uncancelled(self.delete(created))
            raise
        return created["id"], created

    async def shell(self, handle: Any, line: str) -> tuple[int, str]:
        request = {"command": line, "timeout": _LIFETIME_S}
        answer = json.loads(await self._toolbox(handle, "POST", "/process/execute", json=request))
        return answer.get("exitCode") or 0, answer["result"]

    async def write(self, handle: Any, path: str, content: bytes) -> None:
        upload = {"file": (path, content)}
        await self._toolbox(handle, "POST", "/files/upload-v2", params={"path": path}, files=upload)

    async def read(self, handle: Any, path: str) -> bytes:
        return await self._toolbox(handle, "GET", "/files/download", params={"path": path})

    async def delete(self, handle: Any) -> None:
        await self._api("DELETE", f"/sandbox/{handle['id']}")

    async def _toolbox(self, handle: Any, method: str, path: str, **arguments: Any) -> bytes:
        url = f"{handle['toolboxProxyUrl'].rstrip('/')}/{handle['id']}{path}"
        return await _send(method, url, headers=self._headers(), **arguments)

    async def _api(self, method: str, path: str, **arguments: Any) -> bytes:
        url = os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        return await _send(method, url + path, headers=self._headers(), **arguments)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {os.environ['DAYTONA_API_KEY']}"}


class Modal(RemoteBackend):
    """Modal, by its package. An image is one that it can pull; a handle is a `modal.Sandbox`."""

    name = "modal"
    variables = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")

    def check(self) -> None:
        super().check()
        _modal()

    async def create(self, image: str, limits: SandboxLimits, env: Mapping[str, str]) -> tuple[str, Any]:
        address, modal = gateway_address(), _modal()
        network = {"outbound_cidr_allowlist": [f"{address[0]}/32"]} if address else {"block_network": True}
        with _modal_errors(f"a sandbox of {image} cannot be started"):
            sandbox = await modal.Sandbox.create.aio(
                *("sleep", "infinity"),
                app=await modal.App.lookup.aio("rllm-sandboxes", create_if_missing=True),
                image=modal.Image.from_registry(image),
                env=dict(env),
                cpu=(limits.cpus, limits.cpus),
                memory=(limits.memory_mb, limits.memory_mb),
                timeout=_LIFETIME_S,
                **network,
            )
        return sandbox.object_id, sandbox

    async def shell(self, handle: Any, line: str) -> tuple[int, str]:
        with _modal_errors(f"sandbox {handle.object_id}"):
            process = await handle.exec.aio("sh", "-c", line)
            output, errors = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
            return await process.wait.aio(), output or errors

    async def write(self, handle: Any, path: str, content: bytes) -> None:
        with _modal_errors(f"sandbox {handle.object_id}"):
            await handle.filesystem.write_bytes.aio(content, path)

    async def read(self, handle: Any, path: str) -> bytes:
        with _modal_errors(f"sandbox {handle.object_id}"):
            return bytes(await handle.filesystem.read_bytes.aio(path))

    async def delete(self, handle: Any) -> None:
        with _modal_errors(f"sandbox {handle.object_id}"):
            await handle.terminate.aio()


@contextmanager
def _modal_errors(where: str) -> Iterator[None]:
    """Convert errors of Modal's package to `SandboxError`s."""
    try:
        yield
    except _modal().exception.Error as error:
        raise SandboxError(f"{where}: {error}") from error


def _modal() -> Any:
    try:
        import modal
    except ImportError as error:
        raise MissingDependencyError(
            "sandbox=modal needs the package 'modal', which is not installed: pip install modal"
        ) from error
    return modal
