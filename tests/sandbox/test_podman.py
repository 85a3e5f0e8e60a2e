"""Images, snapshots and cleanup, with the real podman."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from rllm.sandbox import SandboxError, containers
from rllm.sandbox.base import ImageSource

from ..waiting import wait_for
from .conftest import DEBIAN, SMALL, backend_or_skip, shells_of

pytestmark = pytest.mark.sandbox


@pytest.fixture
def podman():
    return backend_or_skip("podman")


def run_podman(*arguments: str) -> int:
    return subprocess.run(["podman", *arguments], capture_output=True).returncode


async def test_image_is_built_once_per_content(podman, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nWORKDIR /srv/app\nCOPY . .\nRUN date +%N > built\n")
    (tmp_path / "file").write_text("one")
    source = ImageSource(folder=tmp_path)
    first, again = await asyncio.gather(podman.image(source), containers.Podman().image(source))
    (tmp_path / "file").write_text("two")
    second = await podman.image(source)
    try:
        assert first == again
        assert second != first
        async with await podman.start(second, limits=SMALL) as sandbox:
            assert (await sandbox.exec("pwd; cat file")).stdout == "/srv/app\ntwo"
    finally:
        for image in {first, second}:
            await podman.remove_image(image)


def test_image_build_is_shared_across_event_loops(podman, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN date +%N > built\n")

    async def images() -> set[str]:
        return set(await asyncio.gather(*(podman.image(ImageSource(folder=tmp_path)) for _ in range(3))))

    [first], [again] = asyncio.run(images()), asyncio.run(images())
    assert first == again
    asyncio.run(podman.remove_image(first))


async def test_volumes_of_an_image_count_towards_the_limit(podman, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN mkdir /data\nVOLUME /data\n")
    image = await podman.image(ImageSource(folder=tmp_path))
    async with await podman.start(image, limits=SMALL) as sandbox:
        assert " /data " not in (await sandbox.exec("cat /proc/mounts; ls /data")).stdout
    await podman.remove_image(image)


async def test_failed_build_reports_the_end_of_its_output(podman, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {DEBIAN}\nRUN echo the reason >&2; exit 7\n")
    with pytest.raises(SandboxError, match="the reason") as raised:
        await podman.image(ImageSource(folder=tmp_path))
    assert "exit status 7" in str(raised.value).partition("\n")[0]
    (tmp_path / "Dockerfile").unlink()
    with pytest.raises(SandboxError, match="Dockerfile"):
        await podman.image(ImageSource(folder=tmp_path))


async def test_snapshot_has_files_and_folder(podman):
    async with await podman.start(DEBIAN, limits=SMALL, workdir="/here") as sandbox:
        await sandbox.exec("echo saved > file")
        image = await sandbox.snapshot()
        await sandbox.exec("echo later > file")
    async with await podman.start(image, limits=SMALL) as sandbox:
        assert (await sandbox.exec("pwd; cat file")).stdout == "/here\nsaved\n"
    await podman.remove_image(image)
    with pytest.raises(SandboxError):
        await podman.start(image)


async def test_lack_of_memory_leaves_no_file_in_the_current_folder(podman, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with await podman.start(DEBIAN, limits=SMALL) as sandbox:
        ended = await sandbox.exec("python3 -c 'bytearray(10**9)'", timeout_s=60)
        assert not ended.ok
    assert list(tmp_path.iterdir()) == []


async def test_too_many_files_end_the_sandbox(podman, monkeypatch):
    monkeypatch.setattr(containers, "_DISK_CHECK_S", 0.1)
    sandbox = await podman.start(DEBIAN, limits=SMALL)
    with pytest.raises(SandboxError, match="disk_mb=64"):
        await sandbox.exec("for i in 1 2 3; do head -c 30000000 /dev/zero > $i; done; sleep 1000")
    with pytest.raises(SandboxError, match="disk_mb=64"):
        await sandbox.exec("true")


async def test_container_removed_during_a_command_is_an_error(podman):
    sandbox = await podman.start(DEBIAN, limits=SMALL)
    begun = asyncio.Event()
    running = asyncio.create_task(sandbox.exec("echo begun; sleep 1000", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    assert run_podman("rm", "--force", "--time", "0", sandbox.id) == 0
    with pytest.raises(SandboxError, match="ended"):
        await running
    await sandbox.close()


START = f"""
import asyncio
from rllm.sandbox import open_backend

async def main():
    sandbox = await open_backend("podman").start("{DEBIAN}")
    print(sandbox.id, await sandbox.snapshot(), flush=True)
    await sandbox.exec("sleep 1116")

asyncio.run(main())
"""


@pytest.mark.parametrize("with_shell", [True, False])
async def test_kill_9_leaves_nothing(podman, with_shell):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", START, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    container, image = (await process.stdout.readline()).decode().split()
    if not with_shell:
        kill_shell(process.pid)
    process.kill()
    await process.wait()
    if not with_shell:
        assert run_podman("container", "exists", container) == 0
        assert await podman.remove_orphans() >= 1
    wait_for(lambda: run_podman("container", "exists", container) == 1)
    wait_for(lambda: run_podman("image", "exists", image) == 1)


def kill_shell(owner: int) -> None:
    for process in shells_of(owner):
        process.kill()


async def test_sandboxes_of_a_running_process_are_not_orphans(podman):
    async with await podman.start(DEBIAN, limits=SMALL) as sandbox:
        await containers.Podman().remove_orphans()
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
