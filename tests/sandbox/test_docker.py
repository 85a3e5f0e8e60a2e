"""Command lines of containers, answered by a fake program `docker` or `podman`: no daemon is needed.

The last test uses the real `docker`, with podman's service in place of docker's daemon.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import SandboxError, SandboxLimits, containers, open_backend
from rllm.sandbox.base import ImageSource
from rllm.sandbox.owner import this_process

from ..waiting import wait_for
from .conftest import DEBIAN, SMALL

pytestmark = pytest.mark.sandbox

SCRIPT = f"""#!{sys.executable} -S
import json, os, pathlib, sys
folder, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
values = {{name: os.environ.get(name) for name in ("A", "B", "KEY")}}
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps([arguments, values]) + "\\n")
for start, exit_code, stdout, stderr in json.loads((folder / "answers").read_text()):
    if " ".join(arguments).startswith(start):
        sys.stdout.write(stdout)
        sys.stderr.write(stderr)
        sys.exit(exit_code)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Set the first answer for command lines with this beginning; return all command lines after `info`."""
    for name in ("docker", "podman", "runc"):
        (tmp_path / name).write_text(SCRIPT)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(containers, "run_after", lambda *_: None)
    answers: list[tuple[str, int, str, str]] = []

    class Scripted:
        def answer(self, start: str, exit_code: int = 0, stdout: str = "", stderr: str = "") -> None:
            answers.insert(0, (start, exit_code, stdout, stderr))
            (tmp_path / "answers").write_text(json.dumps(answers))

        def calls(self) -> list[list]:
            lines = (tmp_path / "calls").read_text().splitlines()
            return [call for call in map(json.loads, lines) if call[0] != ["info"]]

    scripted = Scripted()
    scripted.answer("image inspect --format", stdout="/app\n")
    return scripted


async def test_container_is_started_used_and_removed(docker, tmp_path):
    (tmp_path / "tools").mkdir()
    sandbox = await open_backend("docker").start(
        "image:1",
        limits=SandboxLimits(cpus=0.5, memory_mb=100, disk_mb=1, max_processes=7),
        env={"KEY": "secret"},
        mounts={"/tools": tmp_path / "tools"},
    )
    docker.answer("exec", 3, "out\n", "err\n")
    result = await sandbox.exec("echo out; exit 3", cwd="/x", env={"A": "1", "PATH": "/bin"})
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    await sandbox.close()

    orphans, _, image, run, command, remove = docker.calls()
    assert orphans[0] == ["ps", "--all", "--quiet", "--filter", "label=rllm.owner"]
    assert image[0][-2:] == ["--", "image:1"]
    options = run[0]
    for option in (
        ["--network", "none"],
        ["--pull", "never"],
        ["--label", f"rllm.owner={this_process()}"],
        ["--cpus", "0.5"],
        ["--pids-limit", "7"],
        ["--memory", "100m"],
        ["--memory-swap", "100m"],
        ["--ulimit", "fsize=1048576:1048576"],
        ["--security-opt", "no-new-privileges"],
        ["--mount", f"type=bind,source={tmp_path}/tools,target=/tools,readonly"],
        ["--env", "KEY"],
        ["--entrypoint", "sh"],
    ):
        assert option[1] in [after for before, after in itertools.pairwise(options) if before == option[0]]
    assert run[1]["KEY"] == "secret"
    assert command[0][:3] == ["exec", "--env", "A"]
    assert command[0][3:5] == ["--env", "PATH=/bin"]
    assert command[0][-6:] == ["--workdir", "/x", sandbox.id, "sh", "-c", "echo out; exit 3"]
    assert command[1]["A"] == "1"
    assert remove[0] == ["rm", "--force", "--volumes", sandbox.id]


async def test_exited_container_is_an_error(docker):
    sandbox = await open_backend("docker").start("image:1")
    docker.answer("exec", 1, stderr="Error response from daemon: container is not running\n")
    docker.answer("container inspect", 1, stderr="Error: No such container\n")
    with pytest.raises(SandboxError, match="is not running"):
        await sandbox.exec("true")


async def test_container_that_does_not_start_is_removed(docker):
    docker.answer("run", 125, stderr="docker: no space left on device\n")
    with pytest.raises(SandboxError, match="no space left"):
        await open_backend("docker").start("image:1")
    assert docker.calls()[-1][0][:2] == ["rm", "--force"]


async def test_podman_falls_back_from_crun_to_runc(docker):
    docker.answer("run", 126, stderr="Error: crun: unknown cgroup mode: OCI runtime error\n")
    podman = open_backend("podman")
    await podman.start("image:1")
    await podman.start("image:1")
    starts = [call[:3] for call, _ in docker.calls() if "--detach" in call]
    assert starts == [["run", "--detach", "--rm"], ["--runtime", "runc", "run"], ["--runtime", "runc", "run"]]


async def test_missing_image_is_pulled_once(docker):
    docker.answer("image inspect --", 1)
    docker.answer("pull", 1, stderr="manifest unknown\n")
    with pytest.raises(SandboxError, match="manifest unknown"):
        await open_backend("docker").image(ImageSource(name="debian:nonsense"))
    assert docker.calls()[-1][0] == ["pull", "--", "debian:nonsense"]


async def test_remains_of_ended_processes_are_removed(docker):
    machine, boot, namespace, pid, _ = this_process().split(":")
    docker.answer("ps", stdout="c1\nc2\n")
    docker.answer("container inspect", stdout=f"c1 {machine}:{boot}:{namespace}:{pid}:7\nc2 {this_process()}\n")
    assert await open_backend("docker").remove_orphans() == 1
    assert ["rm", "--force", "--volumes", "c1"] in [call for call, _ in docker.calls()]


def test_missing_program_or_daemon_is_reported(docker, monkeypatch):
    docker.answer("info", 1, stderr="Cannot connect to the Docker daemon. Is it running?\n")
    with pytest.raises(ConfigError, match=r"sandbox=docker.*Cannot connect"):
        open_backend("docker")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sandbox=docker.*not installed"):
        open_backend("docker")


@pytest.fixture
def service(tmp_path, monkeypatch):
    if not shutil.which("docker") or not shutil.which("podman"):
        pytest.skip("needs docker's command line, and podman")
    address = f"unix://{tmp_path}/socket"
    with subprocess.Popen(
        ["podman", "system", "service", "--time", "0", address], stderr=subprocess.DEVNULL
    ) as process:
        wait_for((tmp_path / "socket").exists)
        monkeypatch.setenv("DOCKER_HOST", address)
        yield
        process.terminate()


@pytest.mark.sandbox
async def test_sandbox_works_with_the_real_command_line(service, tmp_path):
    backend = open_backend("docker")
    (tmp_path / "image").mkdir()
    (tmp_path / "image/Dockerfile").write_text(f"FROM {DEBIAN}\nRUN echo built > /file\n")
    image = await backend.image(ImageSource(folder=tmp_path / "image"))
    async with await backend.start(image, limits=SMALL, env={"A": "1"}) as sandbox:
        result = await sandbox.exec('pwd; echo "$A"; cat /file -; exit 3', input="typed")
        assert (result.exit_code, result.stdout) == (3, "/app\n1\nbuilt\ntyped")
        assert (await sandbox.exec("sleep 1119 & sleep 1120", timeout_s=1)).timed_out
        assert "sleep\x001119" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout
        await sandbox.upload(tmp_path / "image", "/new")
        await sandbox.download("/new/Dockerfile", tmp_path / "out")
        assert (tmp_path / "out").read_text().startswith("FROM")
        assert await backend.remove_orphans() == 0
    with pytest.raises(SandboxError):
        await sandbox.exec("true")
    await backend.remove_image(image)
    with pytest.raises(SandboxError):
        await backend.start(image)
