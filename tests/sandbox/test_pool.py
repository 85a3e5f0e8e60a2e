"""A pool limits the sandboxes of a backend, starts some ahead, and closes unused ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rllm.sandbox import ExecResult, Sandbox, SandboxBackend, SandboxError, SandboxLimits
from rllm.sandbox.base import SandboxSpec
from rllm.sandbox.pool import SandboxPool


class Room(Sandbox):
    """A sandbox of a backend without processes."""

    def __init__(self, backend: Rooms, image: str) -> None:
        self.id, self.workdir, self.image, self.backend = str(id(self)), "/", image, backend
        backend.open.append(self)

    async def exec(self, command, **_) -> ExecResult:
        if self not in self.backend.open:
            raise SandboxError("it has ended")
        return ExecResult(exit_code=0, stdout="", stderr="")

    async def upload(self, source: Path, target: str) -> None: ...

    async def download(self, source: str, target: Path, *, max_bytes: int = 0) -> None: ...

    async def open_route(self, url: str) -> str:
        return url

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self in self.backend.open:
            self.backend.open.remove(self)


class Rooms(SandboxBackend):
    name = "rooms"

    def __init__(self) -> None:
        self.open: list[Room] = []
        self.num_started = 0

    def check(self) -> None: ...

    async def launch(self, spec: SandboxSpec) -> Room:
        await asyncio.sleep(0)
        if spec.image == "broken":
            raise SandboxError("broken")
        self.num_started += 1
        return Room(self, spec.image)


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_concurrency_limits_sandboxes_in_use():
    backend = Rooms()
    pool, most = SandboxPool(backend, concurrency=3, warm=0), 0

    async def use() -> None:
        nonlocal most
        async with await pool.start("a"):
            most = max(most, len(backend.open))
            await settled()

    await asyncio.gather(*(use() for _ in range(10)))
    assert (most, backend.num_started, backend.open) == (3, 10, [])


async def test_failed_start_and_second_close_keep_the_limit():
    pool = SandboxPool(Rooms(), concurrency=1, warm=1)
    for _ in range(2):
        with pytest.raises(SandboxError):
            await pool.start("broken")
    sandbox = await pool.start("a")
    await sandbox.close()
    await sandbox.close()
    async with await pool.start("a"):
        waiting = asyncio.create_task(pool.start("a"))
        await settled()
        assert not waiting.done()
    await (await waiting).close()


def unused(backend: Rooms, *used: Sandbox) -> list[str]:
    return sorted(room.image for room in backend.open if room not in used)


async def test_sandboxes_of_the_last_two_kinds_are_prestarted_and_used_once():
    backend = Rooms()
    pool = SandboxPool(backend, concurrency=8, warm=2)
    used = [await pool.start("a")]
    await settled()
    assert unused(backend, *used) == ["a", "a"]
    ahead = [room for room in backend.open if room not in used]
    used.append(await pool.start("a", limits=SandboxLimits()))
    assert used[1] in ahead
    await settled()
    used.append(await pool.start("b"))
    await settled()
    assert unused(backend, *used) == ["a", "a", "b", "b"]
    used.append(await pool.start("c"))
    await settled()
    assert unused(backend, *used) == ["b", "b", "c", "c"]
    assert len(set(used)) == 4


async def test_warm_sandboxes_that_have_ended_are_replaced():
    backend = Rooms()
    pool = SandboxPool(backend, warm=2)
    used = [await pool.start("a")]
    await settled()
    dead, alive = (room for room in backend.open if room not in used)
    backend.open.remove(alive)
    backend.open.remove(dead)
    async with await pool.start("a") as sandbox:
        assert sandbox not in (dead, alive)
        assert (await sandbox.exec("true")).ok
    await used[0].close()


def test_unused_sandboxes_are_closed_with_the_event_loop():
    backend = Rooms()
    pool = SandboxPool(backend, warm=3)

    async def use() -> None:
        async with await pool.start("a"):
            await settled()
            assert len(backend.open) == 4

    for _ in range(2):  # each in its own loop
        asyncio.run(use())
        assert backend.open == []
