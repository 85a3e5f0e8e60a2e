"""Whole runs whose rollouts are on Ray: a user's project on a cluster of two nodes, and how a run ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from ray_project import all_gone, lines, settings, tasks_of, until, who, write_project

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster of a head and another node; this process is not connected."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


def rllm_train(project: Path, data: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "rllm", "train", "agents/agent.py:answer", "--data", str(data), *arguments]


def done(command: list[str], project: Path) -> None:
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_project_trains_on_other_nodes_as_locally(
    address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path)
    here = rllm_train(project, data, *settings(model_folder, tmp_path / "here"))
    done(here, project)
    log.unlink()
    on_nodes = ["rollout.runner=ray", f"ray.address={address}", f"ray.working_dir={project}"]
    done(rllm_train(project, data, *settings(model_folder, tmp_path / "there"), *on_nodes), project)
    made = who(log)
    assert len(made) == 2 * 2 * 4
    assert len({pid for pid, _ in made}) == 2
    assert all(Path(folder) != project for _, folder in made), "each node has a copy"
    rewards = [
        [line["rollout/reward"] for line in lines(tmp_path / run) if "rollout/reward" in line]
        for run in ("here", "there")
    ]
    assert rewards[0] == pytest.approx(rewards[1])


@pytest.mark.parametrize("door", ["function", "agent", "workflow"])
def test_every_rollout_source_is_created_on_the_nodes(
    door: str, address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    config = settings(model_folder, tmp_path / "run", "rollout.runner=ray", f"ray.address={address}")
    done([sys.executable, "train.py", door, str(log), *config], project)
    assert len({pid for pid, _ in who(log)}) == 2
    steps = [line for line in lines(tmp_path / "run") if "rollout/reward" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]
    assert all(line["tokens/trained"] > 0 for line in steps)


@pytest.mark.parametrize("agent", [[], ["games.py:guess"]], ids=["its own agent", "a function"])
def test_named_environment_is_opened_on_the_nodes(
    agent: list[str], address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    config = settings(model_folder, tmp_path / "run", "rollout.runner=ray", f"ray.address={address}")
    named = ["--env", f"gymnasium:games:Guess-v0?size=4&max_steps=2&log={log}"]
    done([sys.executable, "-m", "rllm", "train", *agent, *named, *config, f"ray.working_dir={project}"], project)
    assert all(Path(folder) != project for _, folder in who(log)), "each node has a copy"
    steps = [line for line in lines(tmp_path / "run") if "rollout/reward" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]


def test_verl_workers_and_rollouts_share_a_cluster(
    address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path)
    config = settings(model_folder, tmp_path / "run", "rollout.runner=ray", "verl.timeout_s=400")
    done(rllm_train(project, data, "--backend", "verl", "--ray-address", address, *config), project)
    assert len({pid for pid, _ in who(log)}) == 2
    steps = [line for line in lines(tmp_path / "run") if "rollout/reward" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]
    assert all("policy/loss" in line for line in steps)


def begun(command: list[str], project: Path, log: Path) -> tuple[subprocess.Popen[bytes], set[int]]:
    """Start a driver with rollouts in progress, and return it with their processes."""
    driver = subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(who(log)) >= 4 or driver.poll() is not None)
    assert driver.poll() is None
    return driver, {int(pid) for pid, _ in who(log)}


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
"""Exit codes of a driver that received the signal, in order but for the last, though Ray would handle SIGTERM itself."""


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_processes_end_with_their_driver(
    number: signal.Signals, address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path, sleep=300.0)
    on_nodes = ["rollout.runner=ray", f"ray.address={address}", "rollout.timeout_s=1000"]
    command = rllm_train(project, data, *settings(model_folder, tmp_path / "run"), *on_nodes)
    driver, pids = begun(command, project, log)
    driver.send_signal(number)
    assert driver.wait(timeout=120) == CODES[number]
    until(lambda: all_gone(pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_cluster_started_for_a_run_ends_with_it(
    number: signal.Signals, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path, sleep=300.0)
    command = rllm_train(project, data, *settings(model_folder, tmp_path / "run"), "rollout.runner=ray")
    driver, pids = begun(command, project, log)
    pids |= {child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
    driver.send_signal(number)
    assert driver.wait(timeout=120) == CODES[number]
    until(lambda: all_gone(pids))
