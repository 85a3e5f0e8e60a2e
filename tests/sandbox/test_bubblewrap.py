"""The backend `local`: bubblewrap, real namespaces and control groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import SandboxError, SandboxLimits, bubblewrap, open_backend
from rllm.sandbox.base import ImageSource
from rllm.sandbox.control_groups import left_groups, parents, remove_group

from ..docs.pages import DOCS, fences
from ..waiting import wait_for
from .conftest import SMALL, backend_or_skip
from .test_attacks import processes

pytestmark = pytest.mark.sandbox


@pytest.fixture
def local(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
    return backend_or_skip("local")


async def test_sandbox_has_no_privileges_and_cannot_gain_any(local):
    async with await local.start("host", limits=SMALL) as sandbox:
        status = (await sandbox.exec("cat /proc/self/status")).stdout
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{kind}:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        for command in ("unshare --user true", "mount -t tmpfs none /tmp", "mount -o remount,rw /usr", "chroot / true"):
            assert not (await sandbox.exec(command)).ok
        # The first process is bubblewrap of this machine: its file is read-only, and so are its permissions.
        for command in (
            "echo > /proc/1/exe",
            "chmod 4777 /proc/1/exe",
            "touch /usr/bin/new",
            "echo 1 > /proc/sys/kernel/panic",
        ):
            assert not (await sandbox.exec(command)).ok


async def test_background_process_does_not_keep_a_command_open(local):
    async with await local.start("host", limits=SMALL) as sandbox:
        result = await sandbox.exec(
            "(sleep 0.2; yes) & sleep 1119 & head -c 200000 /dev/zero | tr '\\0' a; exit 3", timeout_s=60
        )
        assert (result.exit_code, result.timed_out, result.stdout) == (3, False, "a" * 200_000)
        assert "sleep\x001119" in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_control_group_of_a_command_is_removed_once_it_has_no_processes(local):
    async with await local.start("host", limits=SMALL) as sandbox:
        groups = [group for group in left_groups() if sandbox.id in group.name]

        def of_commands():
            return [inner for group in groups for inner in group.iterdir() if inner.is_dir()]

        await sandbox.exec("sleep 1117 >/dev/null 2>&1 & echo $! > /tmp/pid")
        await sandbox.exec("true")
        assert len(of_commands()) == 1
        await sandbox.exec("kill -9 $(cat /tmp/pid); while kill -0 $(cat /tmp/pid); do sleep 0.01; done 2>/dev/null")
        await sandbox.exec("true")
        assert of_commands() == []


async def test_user_id_belongs_to_the_sandbox(local):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    async with await local.start("host", limits=SMALL) as one, await local.start("host", limits=SMALL) as other:
        assert (await one.exec("id -u")).stdout == "0\n"
        ids = {os.stat(f"/proc/{sandbox._first_process}").st_uid for sandbox in (one, other)}  # noqa: PTH116
    assert len(ids) == 2
    assert min(ids) >= 0x60000000


async def test_limits_apply_to_all_processes_together(local):
    if len(parents()) < 3:
        pytest.skip("needs control groups")
    async with await local.start("host", limits=SMALL) as sandbox:
        three = "import os, time; os.fork(); os.fork(); held = bytearray(150 << 20); print('held', flush=True); time.sleep(3)"
        assert (await sandbox.exec(["python3", "-c", three])).stdout.count("held") < 4
        many = "import os\nfor n in range(1000):\n if not os.fork(): os.execlp('sh', 'sh', '-c', 'exec sleep 1117 2>/dev/null >&2')"
        assert "BlockingIOError" in (await sandbox.exec(["python3", "-c", many], timeout_s=60)).stderr
        assert 0 < len([line for line in processes() if line == "sleep 1117"]) <= SMALL.max_processes
        assert not (await sandbox.exec("for i in 1 2 3; do head -c 30000000 /dev/zero > $i || exit; done")).ok


async def test_empty_files_count_as_memory(local):
    if len(parents()) < 3:
        pytest.skip("needs control groups")
    names = "import os\nfor n in range(400_000): os.close(os.open(f'/tmp/{n:0200}', os.O_CREAT))"
    async with await local.start("host", limits=SandboxLimits(memory_mb=32, disk_mb=16)) as sandbox:
        with contextlib.suppress(SandboxError):
            assert not (await sandbox.exec(["python3", "-c", names], timeout_s=60)).ok


async def test_folder_with_a_root_file_system_is_an_image(local, tmp_path):
    for name in ("sh", "sleep", "cat"):
        copy_with_libraries(Path("/bin") / name, tmp_path)
    (tmp_path / "etc/work").mkdir(parents=True)
    (tmp_path / "etc/name").write_text("of the image")
    (tmp_path / "opt").mkdir()
    image = await local.image(ImageSource(name=str(tmp_path)))
    async with await local.start(image, limits=SMALL, workdir="/etc/work") as sandbox:
        assert (
            await sandbox.exec("echo > file; cat /etc/name; echo x > /opt/x && cat /opt/x")
        ).stdout == "of the imagex\n"
        assert not (await sandbox.exec("echo x > /etc/name")).ok
        assert not (await sandbox.exec("cat /usr/bin/env")).ok
    assert [path.name for path in (tmp_path / "opt").iterdir()] == []
    with pytest.raises(SandboxError, match="root file system"):
        await local.image(ImageSource(name=str(tmp_path / "opt")))


async def test_snapshot_has_files_folder_and_variables(local, tmp_path):
    folder = make_context(tmp_path)
    image = await local.image(ImageSource(folder=folder))
    async with await local.start(image, limits=SMALL) as sandbox:
        await sandbox.exec(
            "echo changed > copied/a; mkdir -p /srv/deep; ln -s /usr/bin/env /srv/deep/link; chmod 700 /srv"
        )
        first = await sandbox.snapshot()
    async with await local.start(first, limits=SMALL) as sandbox:
        assert (await sandbox.exec("echo more > b; pwd; cat copied/a; readlink /srv/deep/link; echo $WHO")).stdout == (
            "/app/work\nchanged\n/usr/bin/env\nof the image\n"
        )
        second = await sandbox.snapshot()
    async with await local.start(second, limits=SMALL) as sandbox:
        assert (await sandbox.exec("cat b copied/a; stat -c %a /srv")).stdout == "more\nchanged\n700\n"
    for snapshot in (first, second):
        await local.remove_image(snapshot)
        with pytest.raises(SandboxError):
            await local.start(snapshot)


def make_context(folder: Path) -> Path:
    (folder / "data/sub").mkdir(parents=True)
    (folder / "data/a").write_text("a")
    (folder / "data/sub/b.sh").write_text("echo b")
    (folder / "one.txt").write_text("one")
    (folder / "host").symlink_to("/etc/hostname")
    (folder / "Dockerfile").write_text(
        """# comment
FROM python:3.12-slim
ENV WHO="of the image" N=1
WORKDIR /app
WORKDIR work
COPY data copied/
COPY ["one.txt", "."]
COPY data/sub/b.sh /bin2/run.sh
RUN echo "$WHO" > who && \\
    # comment
    date +%s%N > built
LABEL a=b
CMD ["sh"]
"""
    )
    return folder


async def test_dockerfile_is_built_once_per_content(local, tmp_path):
    folder = make_context(tmp_path)
    first, again = await asyncio.gather(*(local.image(ImageSource(folder=folder)) for _ in range(2)))
    assert first == again
    async with await local.start(first, limits=SMALL) as sandbox:
        result = await sandbox.exec("cat copied/a one.txt who; sh copied/sub/b.sh; sh /bin2/run.sh; pwd; ls")
        assert result.stdout == "aoneof the image\nb\nb\n/app/work\nbuilt\ncopied\none.txt\nwho\n"
        built = (await sandbox.exec("cat built")).stdout
    async with await open_backend("local").start(await local.image(ImageSource(folder=folder))) as sandbox:
        assert (await sandbox.exec("cat built")).stdout == built
    (folder / "one.txt").write_text("two")
    assert await local.image(ImageSource(folder=folder)) != first


async def test_dockerfile_with_unsupported_steps_is_an_error(local, tmp_path):
    for line, reason in (("RUN echo the reason >&2; exit 7", "the reason"), ("RUN touch /usr/bin/new", "Read-only")):
        (tmp_path / "Dockerfile").write_text(f"FROM python:3.12\n{line}\n")
        with pytest.raises(SandboxError, match=reason):
            await local.image(ImageSource(folder=tmp_path))


def copy_with_libraries(program: Path, root: Path) -> None:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in (str(program), *(word for word in listed.split() if word.startswith("/"))):
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


START = """
import asyncio
from rllm.sandbox import open_backend

async def main():
    sandboxes = [await open_backend("local").start("host") for _ in range(2)]
    for sandbox in sandboxes:
        await sandbox.exec("(setsid sh -c 'trap \\"\\" TERM INT HUP; sleep 1118' >/dev/null 2>&1 &)")
    print("begun", flush=True)
    await sandboxes[0].exec("exec sleep 1118")

asyncio.run(main())
"""


async def test_kill_9_leaves_nothing(local):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", START, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    assert await process.stdout.readline() == b"begun\n"
    wait_for(lambda: len([line for line in processes() if "sleep 1118" in line]) >= 3)
    process.kill()
    await process.wait()
    wait_for(lambda: not [line for line in processes() if "sleep 1118" in line])
    for _ in range(1000):
        await local.remove_orphans()
        if not (left := [group for group in left_groups() if f":{process.pid}:" in group.name]):
            break
        await asyncio.sleep(0.01)
    assert not left


def test_kill_9_during_a_start_leaves_nothing(local):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # sandboxes start with another /tmp
        slow = Path(folder, "bwrap")
        slow.write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("bwrap")} "$@"\n')
        for path in (slow, slow.parent):
            path.chmod(0o755)
        program = (
            'import asyncio; from rllm.sandbox import open_backend; asyncio.run(open_backend("local").start("host"))'
        )
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        with subprocess.Popen([sys.executable, "-c", program], env=env) as process:

            def left() -> list[str]:
                groups = [group for group in left_groups() if f":{process.pid}:" in group.name]
                return [line for group in groups for line in (group / "cgroup.procs").read_text().split()]

            wait_for(left)
            process.kill()
        wait_for(lambda: not left())


def test_remaining_groups_are_removed_by_several_processes_at_once(local):
    if "pids" not in parents():
        pytest.skip("needs control groups")
    groups = [parents()["pids"] / f"rllm-sandbox-left:{number}" for number in range(20)]
    left = [subprocess.Popen(["sleep", "1116"]) for _ in groups]
    for group, process in zip(groups, left, strict=True):
        (group / "command").mkdir(parents=True)
        (group / "command" / "cgroup.procs").write_text(str(process.pid))
    with ThreadPoolExecutor(4 + len(left)) as threads:
        ended = [threads.submit(process.wait) for process in left]
        removed = [threads.submit(lambda: [asyncio.run(remove_group(group)) for group in groups]) for _ in range(4)]
        for future in (*removed, *ended):
            future.result()
    assert not [group for group in groups if group.exists()]


async def test_thirty_two_sandboxes_work_concurrently(local):
    async def work(number: int) -> str:
        async with await local.start("host", limits=SMALL) as sandbox:
            await sandbox.exec(f"echo {number} > file")
            return (await sandbox.exec("cat file")).stdout

    assert await asyncio.gather(*map(work, range(32))) == [f"{number}\n" for number in range(32)]


async def test_sandbox_that_dies_during_a_command_is_an_error(local):
    sandbox = await local.start("host", limits=SMALL)
    begun = asyncio.Event()
    running = asyncio.create_task(sandbox.exec("echo begun; sleep 1000", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    os.kill(sandbox._first_process, 9)
    with pytest.raises(SandboxError, match="ended"):
        await running
    await sandbox.close()


def test_missing_bubblewrap_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.problem.cache_clear()
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        open_backend("local")
    bubblewrap.problem.cache_clear()


def test_program_of_the_documentation_runs(local, tmp_path):
    [program] = [fence for fence in fences(DOCS / "concepts/sandbox.md") if fence.title]
    (tmp_path / "program.py").write_text(program.text)
    ended = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
