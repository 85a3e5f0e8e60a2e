"""Properties of every backend."""

from __future__ import annotations

import asyncio
import os

import pytest
import uvloop

from rllm.sandbox import SandboxError

from .conftest import SMALL

pytestmark = pytest.mark.sandbox


async def test_command_has_its_variables_folder_input_and_exit_code(backend, image):
    async with await backend.start(image, limits=SMALL, workdir="/project", env={"A": "of the sandbox"}) as sandbox:
        await sandbox.exec("mkdir sub")
        result = await sandbox.exec(
            'pwd; echo "$A, $B"; cat; echo wrong >&2; exit 3',
            cwd="/project/sub",
            env={"B": "two\nlines"},
            input="typed",
        )
    assert (result.exit_code, result.ok) == (3, False)
    assert (result.stdout, result.stderr) == ("/project/sub\nof the sandbox, two\nlines\ntyped", "wrong\n")


async def test_program_is_run_without_a_shell(sandbox):
    result = await sandbox.exec(["echo", "$HOME", "a b"])
    assert (result.stdout, result.ok) == ("$HOME a b\n", True)
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec("kill -SEGV $$")).exit_code == -11


async def test_output_is_streamed_and_its_middle_is_dropped(sandbox):
    pieces, begun = [], asyncio.Event()

    def collect(stream, piece):
        pieces.append((stream, piece))
        begun.set()

    await sandbox.exec(["mkfifo", "/tmp/pipe"])
    command = "exec 3<> /tmp/pipe; echo first; read line <&3; yes | head -c 3000000; echo last"
    async with asyncio.TaskGroup() as group:
        running = group.create_task(sandbox.exec(command, max_output_bytes=10_000, on_output=collect))
        await asyncio.wait_for(begun.wait(), 60)
        await sandbox.exec("echo > /tmp/pipe")  # the first command waits for this
    result = running.result()
    assert pieces[0] == ("stdout", b"first\n")
    assert result.stdout.startswith("first\ny\n")
    assert result.stdout.endswith("y\nlast\n")
    assert result.num_dropped_bytes == 6 + 3_000_000 + 5 - 10_000
    assert f"{result.num_dropped_bytes:,} bytes omitted" in result.stdout
    assert sum(len(piece) for _, piece in pieces) == 10_000


async def test_command_and_its_processes_are_killed_at_the_deadline(sandbox):
    result = await sandbox.exec("sleep 1111 & setsid sleep 1112 & echo begun; sleep 1113", timeout_s=1)
    assert (result.timed_out, result.ok, result.stdout) == (True, False, "begun\n")
    assert "sleep\x00111" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_cancelled_command_is_killed(sandbox):
    begun = asyncio.Event()
    running = asyncio.create_task(sandbox.exec("echo begun; sleep 1114", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "sleep\x001114" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_files_are_uploaded_and_downloaded(sandbox, tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/run.sh").write_text("echo ran")
    (folder / "sub/run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/run.sh")
    await sandbox.upload(folder, "/data/new")
    await sandbox.upload(folder / "sub/run.sh", "/data/other/name.sh")
    assert (await sandbox.exec("/data/new/link && sh /data/other/name.sh")).stdout == "ran\nran\n"
    await sandbox.exec("echo changed > /data/new/sub/file")
    await sandbox.download("/data/new", tmp_path / "out")
    await sandbox.download("/data/new/sub/file", tmp_path / "a/b")
    assert (tmp_path / "out/sub/file").read_text() == (tmp_path / "a/b").read_text() == "changed\n"
    assert (tmp_path / "out/link").resolve() == tmp_path / "out/sub/run.sh"
    assert (tmp_path / "out/sub/run.sh").stat().st_mode & 0o777 == 0o755


async def test_invalid_paths_and_large_files_are_errors(sandbox, tmp_path):
    for source in ("/missing", "/dev/zero"):
        with pytest.raises(SandboxError):
            await sandbox.download(source, tmp_path / "out")
    (tmp_path / "file").write_text("text")
    with pytest.raises(SandboxError):
        await sandbox.upload(tmp_path / "file", "/proc/file")
    await sandbox.exec("head -c 5000000 /dev/zero > large")
    with pytest.raises(SandboxError, match="max_bytes"):
        await sandbox.download(f"{sandbox.workdir}/large", tmp_path / "large", max_bytes=100_000)


async def test_sandboxes_do_not_share_files_and_a_closed_one_raises(backend, image, sandbox):
    await sandbox.exec("echo mine > /tmp/file")
    async with await backend.start(image, limits=SMALL) as other:
        assert not (await other.exec("cat /tmp/file")).ok
        assert other.id != sandbox.id
    await other.close()
    with pytest.raises(SandboxError):
        await other.exec("true")
    assert (await sandbox.exec("cat /tmp/file")).stdout == "mine\n"


async def test_folder_of_this_machine_is_read_only(backend, image, tmp_path):
    (tmp_path / "program").write_text("echo of this machine")
    tmp_path.chmod(0o755)
    async with await backend.start(image, limits=SMALL, mounts={"/opt/tools": tmp_path}) as sandbox:
        assert (await sandbox.exec("sh /opt/tools/program")).stdout == "of this machine\n"
        assert not (await sandbox.exec("echo > /opt/tools/program || rm /opt/tools/program")).ok
    assert (tmp_path / "program").read_text() == "echo of this machine"


FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


async def test_route_opens_one_path_of_one_server(sandbox):
    async def answer(reader, writer):
        line = await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(line), line))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = await sandbox.open_route(f"http://127.0.0.1:{port}/sessions/1")
        fetched = await sandbox.exec(["python3", "-c", FETCH, f"{url}/v1/models"])
        assert fetched.stdout.startswith("GET /sessions/1/v1/models HTTP/1.1")
        other = await sandbox.exec(["python3", "-c", FETCH, url.replace("/sessions/1", "/sessions/2")])
        assert "403" in other.stderr


async def test_unknown_image_is_an_error(backend):
    with pytest.raises(SandboxError):
        await backend.start("localhost/no-such-image")


def test_commands_inherit_no_open_files_under_uvloop(backend, image):
    """uvloop passes on all inheritable files, as in Ray's workers; podman's monitor would keep its own pipes open."""

    async def listed():
        async with await backend.start(image, limits=SMALL) as sandbox:
            return (await sandbox.exec("ls /proc/self/fd")).stdout

    secret = os.open(__file__, os.O_RDONLY)
    try:
        os.set_inheritable(secret, True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(listed()).split() == ["0", "1", "2", "3"]  # the last one is the listing's own
    finally:
        os.close(secret)
