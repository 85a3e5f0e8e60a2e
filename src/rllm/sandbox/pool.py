"""A backend with a limit on the number of sandboxes at once, and with some that are started in advance."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from rllm.sandbox.base import ImageSource, Sandbox, SandboxBackend, SandboxError, SandboxSpec

_NUM_KINDS = 2
"""An agent's sandbox and its verifier's may differ."""


class SandboxPool(SandboxBackend):
    """Starts sandboxes of another backend.

    A sandbox belongs to the event loop in which it was started. `asyncio.run` cancels the loop's remaining tasks at its
    end, and then the pool closes the sandboxes that were not used.
    """

    def __init__(self, backend: SandboxBackend, *, concurrency: int = 32, warm: int = 0) -> None:
        """Bound a backend.

        Args:
            backend: starts the sandboxes.
            concurrency: sandboxes in use at the same time in one event loop; `start` waits for others to be closed.
            warm: unused sandboxes of each of the two kinds that were requested last, in addition to those in use.
        """
        self.name = backend.name
        self._backend = backend
        self._concurrency = concurrency
        self._warm = warm
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPool] = WeakKeyDictionary()

    def check(self) -> None:
        """Raise `ConfigError` if the backend cannot be used on this machine."""
        self._backend.check()

    async def image(self, source: ImageSource) -> str:
        """Return the image's name, see `SandboxBackend.image`."""
        return await self._backend.image(source)

    async def remove_image(self, image: str) -> None:
        """Delete a snapshot."""
        await self._backend.remove_image(image)

    async def remove_orphans(self) -> int:
        """Remove sandboxes that ended processes left."""
        return await self._backend.remove_orphans()

    async def prepare(self) -> None:
        """Do nothing: the backend prepares itself for its first sandbox."""

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Return a new sandbox, once fewer than `concurrency` are in use."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopPool(self._backend, self._concurrency, self._warm)
        return await self._loops[loop].start(spec)


class _LoopPool:
    """The pool's sandboxes of one event loop."""

    def __init__(self, backend: SandboxBackend, concurrency: int, warm: int) -> None:
        self._backend = backend
        self._warm = warm
        self._in_use = asyncio.Semaphore(concurrency)
        self._specs: OrderedDict[Hashable, SandboxSpec] = OrderedDict()
        """Settings that were requested last, the latest at the end."""
        self._unused: dict[Hashable, list[Sandbox]] = {}
        self._wake = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep()) if warm else None

    async def start(self, spec: SandboxSpec) -> Sandbox:
        await self._in_use.acquire()
        try:
            sandbox = await self._warm_one(spec) or await self._backend.start_spec(spec)
        except BaseException:
            self._in_use.release()
            raise
        self._release_at_close(sandbox)
        self._specs[spec.key] = spec
        self._specs.move_to_end(spec.key)
        while len(self._specs) > _NUM_KINDS:
            self._specs.popitem(last=False)
        self._wake.set()
        return sandbox

    async def _warm_one(self, spec: SandboxSpec) -> Sandbox | None:
        """Return an unused sandbox that still runs, if there is one; close those that have ended."""
        while unused := self._unused.get(spec.key):
            sandbox = unused.pop()
            try:
                await sandbox.check_running()
            except SandboxError:
                await _close([sandbox])
            except BaseException:
                await _close([sandbox])
                raise
            else:
                return sandbox
        return None

    def _release_at_close(self, sandbox: Sandbox) -> None:
        close, is_held = sandbox.close, True

        async def close_and_release() -> None:
            nonlocal is_held
            try:
                await close()
            finally:
                if is_held:
                    is_held = False
                    self._in_use.release()

        sandbox.close = close_and_release  # type: ignore[method-assign]

    async def _keep(self) -> None:
        """Start sandboxes of the kinds that were requested last, until this task is cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for spec in list(self._specs.values()):
                    await self._fill(spec)
                for key in self._unused.keys() - self._specs.keys():
                    await _close(self._unused.pop(key))
        finally:
            for sandboxes in self._unused.values():
                await _close(sandboxes)
            self._unused.clear()

    async def _fill(self, spec: SandboxSpec) -> None:
        unused = self._unused.setdefault(spec.key, [])
        while len(unused) < self._warm and spec.key in self._specs:
            try:
                unused.append(await self._backend.start_spec(spec))
            except (SandboxError, OSError):  # `start` raises the error
                self._specs.pop(spec.key, None)


async def _close(sandboxes: list[Sandbox]) -> None:
    while sandboxes:
        with contextlib.suppress(SandboxError):
            await sandboxes.pop().close()
