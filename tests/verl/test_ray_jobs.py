"""Runs submitted to a cluster's own job server with `ray job submit`, as on Kubernetes: started, watched, stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from ray_project import all_gone, lines, settings, tasks_of, until, who, write_project

from rllm.inference.servers.vllm_server import free_port

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def jobs() -> Iterator[str]:
    """The address of the job server of a cluster, to which this process is not connected.

    It has one node: two on one machine share a folder for submitted files, and each removes those that it no longer needs.
    """
    from ray.cluster_utils import Cluster

    port = free_port()
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **dashboard})
    yield f"http://127.0.0.1:{port}"
    cluster.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def submit(jobs: str, project: Path, model_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the command that submits a run of the project under a name."""

    def command(name: str, data: Path, *words: str) -> list[str]:
        asked = f"train agents/agent.py:answer --data {data} rollout.runner=ray ray.num_actors=2".split()
        train = [sys.executable, "-m", "rllm", *asked, *settings(model_folder, tmp_path / "run"), *words]
        sent = ["--address", jobs, "--submission-id", name, "--working-dir", str(project)]
        return [*RAY, "job", "submit", *sent, "--", *train]

    return command


def ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_run_is_submitted_with_its_folder_and_succeeds(
    submit: Callable[..., list[str]], project: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path)
    done = ran(submit("trains", data))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Job 'trains' succeeded" in done.stdout
    assert len([line for line in lines(tmp_path / "run") if "rollout/reward" in line]) == 2
    folders = {Path(folder) for _, folder in who(log)}
    assert len({pid for pid, _ in who(log)}) == 2
    assert all("working_dir_files" in folder.parts for folder in folders), "in the copy that Ray made of the folder"


def test_run_that_cannot_start_fails_with_its_message(submit: Callable[..., list[str]], tmp_path: Path) -> None:
    data, _ = tasks_of(tmp_path)
    done = ran(submit("fails", data, "rollout.group_size=1"))
    assert done.returncode == 1
    assert "Job 'fails' failed" in done.stdout + done.stderr
    assert "rollout.group_size=1" in done.stdout, "the error is in the job's log"


def test_stopping_a_run_ends_all_its_processes(submit: Callable[..., list[str]], jobs: str, tmp_path: Path) -> None:
    data, log = tasks_of(tmp_path, sleep=300.0)
    command = submit("stops", data, "rollout.timeout_s=1000")
    begun = ran([*command[: command.index("--")], "--no-wait", *command[command.index("--") :]])
    assert begun.returncode == 0, begun.stderr[-3000:]
    until(lambda: len(who(log)) >= 4)
    pids = {int(pid) for pid, _ in who(log)} | {driver_of("stops")}
    stopped = ran([*RAY, "job", "stop", "--address", jobs, "stops"])
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: all_gone(pids))
    assert "was stopped" in ran([*RAY, "job", "status", "--address", jobs, "stops"]).stdout
    printed = ran([*RAY, "job", "logs", "--address", jobs, "stops"]).stdout
    assert "Traceback" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def driver_of(name: str) -> int:
    """Return the process of the run that was submitted under this name."""
    for process in psutil.process_iter(["cmdline"]):
        if "agents/agent.py:answer" in (process.info["cmdline"] or ()) and "job" not in process.info["cmdline"]:
            return int(process.pid)
    raise AssertionError(f"no process of the job {name} runs")
