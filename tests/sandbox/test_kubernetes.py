"""The backend `kubernetes` with a fake program `kubectl`: it runs commands of pods on this machine."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from rllm.errors import ConfigError
from rllm.sandbox import SandboxError, SandboxLimits, kubernetes, open_backend
from rllm.sandbox.base import ImageSource
from rllm.sandbox.owner import this_process

pytestmark = pytest.mark.sandbox

SCRIPT = f"""#!{sys.executable} -S
import json, os, pathlib, sys
folder, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps([arguments, sys.stdin.read() if arguments[0] == "create" else ""]) + "\\n")
if arguments[0] == "exec":
    code = os.waitstatus_to_exitcode(os.spawnvp(os.P_WAIT, "env", arguments[arguments.index("--") + 1:]) << 8)
    if code:
        print("command terminated with exit code", code % 256, file=sys.stderr)
    sys.exit(code % 256)
name = "-".join(word for word in arguments[:2] if not word.startswith("-"))
answer = folder / name
if answer.exists():
    print(answer.read_text())
sys.exit((folder / (name + ".fails")).exists())
"""
RUNNING = {
    "metadata": {"name": "pod-1"},
    "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]},
}


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Folder of the program: its calls, and its answers by the first two words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(SCRIPT)
    (folder / "kubectl").chmod(0o755)
    (folder / "get-pods").write_text(json.dumps({"items": [RUNNING]}))
    (folder / "get-pod").write_text("Running")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(kubernetes, "run_after", lambda *_: None)
    return folder


def calls(folder, verb):
    lines = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return [call for call in lines if call[0][0] == verb]


async def test_pod_runs_commands_and_is_deleted(kubectl, tmp_path, monkeypatch):
    monkeypatch.setenv("RLLM_PUBLIC_GATEWAY_URL", "http://192.0.2.7:8000")
    limits = SandboxLimits(cpus=0.5, memory_mb=100, disk_mb=200)
    work = tmp_path / "work"
    sandbox = await open_backend("kubernetes").start("image:1", limits=limits, workdir=str(work), env={"A": "1"})
    secret = "it's\nthe $KEY"
    result = await sandbox.exec('pwd; echo "$B"; cat; echo wrong >&2; exit 3', env={"B": secret}, input="typed")
    assert (result.exit_code, result.stdout, result.stderr) == (3, f"{work}\n{secret}\ntyped", "wrong\n")
    assert "the $KEY" not in (kubectl / "calls").read_text()
    assert (await sandbox.exec('cat; echo "$B"', env={"B": "two"})).stdout == "two\n"
    (tmp_path / "in").write_text("uploaded")
    await sandbox.upload(tmp_path / "in", f"{work}/sub/file")
    await sandbox.download(str(work), tmp_path / "out")
    assert (tmp_path / "out/sub/file").read_text() == "uploaded"
    assert await sandbox.open_route("http://127.0.0.1:1234/sessions/1/v1") == "http://192.0.2.7:8000/sessions/1/v1"
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.exec("true")

    policy, job = yaml.safe_load_all(calls(kubectl, "create")[0][1])
    assert policy["spec"]["egress"] == [{"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": 8000}]}]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["metadata"]["annotations"]["rllm-owner"] == this_process()
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert pod["containers"][0]["resources"]["limits"] == {
        "cpu": "0.5",
        "memory": "100Mi",
        "ephemeral-storage": "200Mi",
    }
    assert f"rllm-sandbox={sandbox.id}" in calls(kubectl, "delete")[-1][0]


async def test_sandbox_without_public_gateway_has_no_network_and_routes_are_rejected(kubectl, tmp_path, monkeypatch):
    monkeypatch.delenv("RLLM_PUBLIC_GATEWAY_URL", raising=False)
    async with await open_backend("kubernetes").start("image:1", workdir=str(tmp_path)) as sandbox:
        with pytest.raises(ConfigError, match="RLLM_PUBLIC_GATEWAY_URL"):
            await sandbox.open_route("http://127.0.0.1:1234/sessions/1")
    assert next(yaml.safe_load_all(calls(kubectl, "create")[0][1]))["spec"]["egress"] == []


async def test_image_that_cannot_be_pulled_is_an_error_and_the_job_is_deleted(kubectl):
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    (kubectl / "get-pods").write_text(json.dumps({"items": [{"metadata": {"name": "pod-1"}, "status": status}]}))
    with pytest.raises(SandboxError, match="no such image"):
        await open_backend("kubernetes").start("image:1")
    assert len(calls(kubectl, "delete")) == 1


async def test_lost_pod_is_an_error(kubectl, tmp_path):
    sandbox = await open_backend("kubernetes").start("image:1", workdir=str(tmp_path))
    (kubectl / "get-pod").write_text("Failed")
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.exec("echo 'Error from server (NotFound)' >&2; exit 1")


async def test_jobs_of_ended_processes_are_deleted(kubectl):
    machine, boot, namespace, pid, _ = this_process().split(":")
    ended = f"{machine}:{boot}:{namespace}:{pid}:7"
    jobs = [
        {"metadata": {"labels": {"rllm-sandbox": name}, "annotations": {"rllm-owner": owner}}}
        for name, owner in (("a", ended), ("b", this_process()), ("c", "another machine"))
    ]
    (kubectl / "get-jobs").write_text(json.dumps({"items": jobs}))
    assert await open_backend("kubernetes").remove_orphans() == 1
    assert "rllm-sandbox in (a)" in calls(kubectl, "delete")[0][0]


async def test_folder_and_cluster_without_permission_are_rejected(kubectl, tmp_path):
    with pytest.raises(SandboxError, match="docker_image"):
        await open_backend("kubernetes").image(ImageSource(folder=tmp_path))
    (kubectl / "auth-can-i").write_text("no")
    (kubectl / "auth-can-i.fails").touch()
    with pytest.raises(ConfigError, match=r"sandbox=kubernetes.*\(no\)"):
        open_backend("kubernetes")
