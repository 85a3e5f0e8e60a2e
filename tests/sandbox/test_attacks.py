"""Attackers in every sandbox."""

from __future__ import annotations

import contextlib
import socket

import pytest

from rllm.sandbox import SandboxError

from .conftest import SMALL

pytestmark = pytest.mark.sandbox


async def test_sandbox_cannot_read_files_or_environment_of_this_machine(sandbox, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("a-secret-of-the-host")
    monkeypatch.setenv("RLLM_TEST_SECRET", "a-secret-of-the-host")
    assert not (await sandbox.exec(["cat", str(tmp_path / "secret")])).ok
    for command in ("env", "cat /proc/[0-9]*/environ", "cat /proc/1/root/proc/1/environ"):
        assert "a-secret-of-the-host" not in (await sandbox.exec(command)).stdout


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"


async def test_sandbox_cannot_reach_ports_of_this_machine_or_the_network(sandbox):
    with socket.create_server(("0.0.0.0", 0)) as server:
        own = socket.gethostbyname(socket.gethostname())
        for host in ("127.0.0.1", own, "1.1.1.1"):
            result = await sandbox.exec(["python3", "-c", CONNECT, host, str(server.getsockname()[1])])
            assert "Error" in result.stderr
        assert (await sandbox.exec("cat /proc/net/dev | wc -l")).stdout == "3\n"  # two lines of titles, and lo


async def test_sandbox_cannot_see_other_sandboxes(backend, image):
    listen = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0other'); s.listen(); time.sleep(1000)"
    async with await backend.start(image, limits=SMALL) as one, await backend.start(image, limits=SMALL) as other:
        await one.exec(f'echo secret > /tmp/file; (exec python3 -c "{listen}" >/dev/null 2>&1 &)')
        wait = "until grep -q @other /proc/net/unix; do sleep 0.1; done; cat /proc/[0-9]*/cmdline"
        assert "AF_UNIX" in (await one.exec(wait, timeout_s=60)).stdout
        seen = await other.exec("cat /proc/[0-9]*/cmdline /proc/net/unix /tmp/*; ls /dev/shm /tmp")
        assert "AF_UNIX" not in seen.stdout
        assert "@other" not in seen.stdout
        assert "secret" not in seen.stdout
        await other.exec("kill -9 -1")
        for sandbox in (one, other):
            assert (await sandbox.exec("echo alive")).stdout == "alive\n"


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


async def test_fork_bomb_ends_at_the_deadline(backend, image):
    async with await backend.start(image, limits=SMALL) as sandbox:
        assert (await sandbox.exec(["python3", "-c", BOMB], timeout_s=2)).timed_out
        # It is killed or, if no more process can start to do so, ends with the sandbox.
        with contextlib.suppress(SandboxError):
            assert (await sandbox.exec("echo alive")).stdout == "alive\n"
    assert not [line for line in processes() if "os.fork()" in line]


async def test_output_flood_is_limited(sandbox):
    pieces = []
    result = await sandbox.exec(
        "yes & yes >&2", timeout_s=2, max_output_bytes=1000, on_output=lambda _, piece: pieces.append(len(piece))
    )
    assert result.timed_out
    assert result.num_dropped_bytes > 0
    assert max(len(result.stdout), len(result.stderr)) < 1100
    assert sum(pieces) <= 2000
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_memory_bomb_is_killed(sandbox):
    result = await sandbox.exec(["python3", "-c", "held = bytearray(2 << 30); print('held')"])
    assert not result.ok
    assert result.stdout == ""
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_single_file_cannot_fill_the_disk(sandbox):
    await sandbox.exec("head -c 300000000 /dev/zero > /tmp/large")
    assert int((await sandbox.exec("stat -c %s /tmp/large")).stdout or 0) <= SMALL.disk_mb << 20


async def test_links_cannot_escape_a_download(sandbox, tmp_path):
    (tmp_path / "host").write_text("of the host")
    await sandbox.exec(
        "mkdir d; ln -s . d/here; ln -s here/../../host d/through; ln -s ../host d/up; ln -s /etc d/root;"
        " ln -s d/file d/in; mkfifo d/pipe; echo mine > d/file; ln -s file d/good"
    )
    await sandbox.download(f"{sandbox.workdir}/d", tmp_path / "out")
    found = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {"file", "good"} <= set(found) <= {"file", "good", "here", "in"}
    assert all(path.resolve().is_relative_to(tmp_path / "out") for path in found.values())
    assert found["good"].read_text() == "mine\n"


async def test_links_in_the_sandbox_cannot_redirect_an_upload(sandbox, tmp_path):
    (tmp_path / "file").write_text("uploaded")
    await sandbox.exec(f"mkdir -p {tmp_path.parent}; ln -s {tmp_path} /tmp/link; ln -s {tmp_path}/target d")
    with contextlib.suppress(SandboxError):
        await sandbox.upload(tmp_path / "file", "/tmp/link/target")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_processes_do_not_survive_the_sandbox(backend, image, tmp_path):
    async with await backend.start(image, limits=SMALL) as sandbox:
        await sandbox.exec("(setsid sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1115; done' >/dev/null 2>&1 &)")
        assert "sleep\x001115" in (await sandbox.exec("sleep 0.2; cat /proc/[0-9]*/cmdline")).stdout
    assert not [name for name in processes() if "sleep 1115" in name]


def processes() -> list[str]:
    import psutil

    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
