"""Every node of a real cluster is checked before a run allocates anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster.address
    cluster.shutdown()


def dry_run(tmp_path: Path, address: str, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `rllm train --backend verl --ray-address ... --dry-run` on a user's file."""
    (tmp_path / "agent.py").write_text("def answer(question):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    command = [sys.executable, "-m", "rllm", "train", "agent.py:answer", "--data", "tasks.jsonl", "--dry-run"]
    command += ["--backend", "verl", "--ray-address", address, "model.device=cpu", *settings]
    return subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **environment},
    )


def test_plan_of_a_cluster_is_printed(address: str, model_folder: Path, tmp_path: Path) -> None:
    settings = ["verl.num_nodes=2", "rollout.runner=ray", f"run_dir={tmp_path / 'run'}"]
    done = dry_run(tmp_path, address, f"model.path={model_folder}", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in (
        "Ray cluster of 2 nodes:",
        "training: 2 nodes x 1 worker, a CPU each, hold",
        "rollouts: 2 processes on the nodes, 64 rollouts under way at a time",
        "episodes a step",
    ):
        assert expected in done.stdout
    assert done.stdout.count(f"verl {version('verl')}") == 2


def test_missing_resources_are_reported_in_one_line(address: str, model_folder: Path, tmp_path: Path) -> None:
    model = f"model.path={model_folder}"
    few = dry_run(tmp_path, address, model, "verl.workers_per_node=8")
    assert few.returncode == 2
    assert "need 8 CPUs on a node, and no node has them (node " in few.stderr.replace("\n", " ")
    unreachable = dry_run(tmp_path, "127.0.0.1:1", model)
    assert unreachable.returncode == 2
    assert "ray.address='127.0.0.1:1': no Ray cluster answers" in unreachable.stderr.replace("\n", " ")


def test_unresponsive_node_is_reported(address: str, model_folder: Path, tmp_path: Path) -> None:
    done = dry_run(tmp_path, address, f"model.path={model_folder}", "ray.start_timeout_s=0.001")
    assert done.returncode == 2
    assert "has not answered within ray.start_timeout_s=0.001: see `ray status`" in " ".join(done.stderr.split())
