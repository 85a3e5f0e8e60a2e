"""Checks of a node's answers; real nodes are tested in tests/verl."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rllm.engine.ray_cluster import ClusterNode
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.preflight import Answer, answered, check_node, check_room, plan

from ..ports import free_port

HERE = Answer(versions={"python": "3.11.7", "rllm": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "verl": "0.9.1"})


def config_of(*more: str) -> TrainConfig:
    return load_config(["backend=verl", *more])


def test_node_with_the_same_packages_passes() -> None:
    check_node("10.0.0.9", HERE, HERE)
    check_node("10.0.0.9", replace(HERE, versions={**HERE.versions, "python": "3.11.9"}), HERE)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            replace(HERE, versions={**HERE.versions, "python": "3.12.1"}),
            r"has python 3.12.1, and this machine has 3.11.7: use Py",
        ),
        (
            replace(HERE, versions={**HERE.versions, "torch": "2.8.0"}),
            r"has torch 2.8.0, .*pip install 'torch==2.13.0'",
        ),
        (
            replace(HERE, versions={**HERE.versions, "verl": None}),
            r"has verl not installed, and this machine has 0.9.1",
        ),
        (replace(HERE, missing=["/models/mine"]), r"does not see '/models/mine' \(model.path or run_dir\): .*share"),
        (replace(HERE, unreached="http://10.0.0.1:81: refused"), r"cannot reach .*10.0.0.1:81: refused.*gateway.host"),
    ],
)
def test_unsuitable_node_is_rejected_with_the_remedy(answer: Answer, message: str) -> None:
    with pytest.raises(ConfigError, match=f"node 10.0.0.9 {message}"):
        check_node("10.0.0.9", answer, HERE)


def test_node_reports_its_packages_and_files(tmp_path: Path) -> None:
    port = free_port()
    answer = answered(("rllm", "no-such-package"), (str(tmp_path), "/no/such"), f"http://127.0.0.1:{port}")
    assert re.fullmatch(r"3\.\d+\.\d+", answer.versions["python"] or "")
    assert answer.versions["no-such-package"] is None
    assert list(answer.missing) == ["/no/such"]
    assert answer.unreached is not None
    assert f"127.0.0.1:{port}" in answer.unreached


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["verl.workers_per_node=8"], "need 8 GPUs on a node, and no node has them (node 10.0.0.1 has 1 GPU)"),
        (["verl.num_nodes=2"], "need 1 GPU on each of 2 nodes, and 1 node has it (node 10.0.0.1 has 1 GPU)"),
    ],
)
def test_cluster_with_too_few_resources_is_rejected(settings: list[str], message: str) -> None:
    node = ClusterNode(id="1", address="10.0.0.1", num_cpus=1, num_gpus=1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_room(config_of(*settings), [node])


def test_plan_uses_singular_forms() -> None:
    node = ClusterNode(id="1", address="10.0.0.1", num_cpus=1, num_gpus=1)
    config = config_of("rollout.runner=ray", "rollout.max_concurrent=1")
    text = "\n".join(plan(config, [node], {"1": HERE}))
    for message in (
        "Ray cluster of 1 node:",
        "10.0.0.1: 1 CPU, 1 GPU",
        "training: 1 node x 1 worker, on a GPU, holds the model\n",
        "rollouts: 1 process on the nodes, 1 rollout under way at a time",
    ):
        assert message in text


def test_plan_shows_placement_and_step_size() -> None:
    nodes = [ClusterNode(id=str(n), address=f"10.0.0.{n}", num_cpus=16, num_gpus=8) for n in (1, 2)]
    answers = {node.id: replace(HERE, gpus=["NVIDIA H100, 81559 MiB"]) for node in nodes}
    config = config_of("verl.num_nodes=2", "verl.workers_per_node=8", "rollout.runner=ray")
    text = "\n".join(plan(config, nodes, answers))
    for message in (
        "Ray cluster of 2 nodes:",
        "10.0.0.2: 16 CPUs, 8 GPUs (NVIDIA H100, 81559 MiB); python 3.11.7 rllm 0.1.0",
        "training: 2 nodes x 8 workers, a GPU each, hold the model in pieces",
        "sampling: the process of the trainer, on this machine",
        "rollouts: 2 processes on the nodes, 64 rollouts under way at a time",
    ):
        assert message in text
