"""What a node's answers lead to; that real nodes are asked is tried in tests/verl."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rllm.engine.ray_cluster import ClusterNode
from rllm.errors import ConfigError
from rllm.trainer.checkpoint import Checkpoints
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.memory import checkpoint_bytes, num_weights, worker_memory
from rllm.trainer.preflight import Answer, Question, answered, check_node, check_room, plan, who_has

from ..ports import free_port

HERE = Answer(versions={"python": "3.11.7", "rllm": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "verl": "0.9.1"})
THERE = replace(HERE, disk_free=10**12)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files that say of themselves to hold 1,000 + 6 weights, and a vocabulary of 10."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, shape in (("a", [10, 100]), ("b", [2, 3])):
        header = json.dumps(
            {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {}}
        ).encode()
        (folder / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text('{"vocab_size": 10}')
    return folder


def config_of(model: Path, *more: str) -> TrainConfig:
    return load_config(["backend=verl", f"model.path={model}", "optim.micro_batch_tokens=100", *more])


def test_a_node_that_has_what_is_here_will_do(model: Path) -> None:
    check_node("10.0.0.9", THERE, HERE, config_of(model))
    check_node("10.0.0.9", replace(THERE, versions={**HERE.versions, "python": "3.11.9"}), HERE, config_of(model))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            replace(THERE, versions={**HERE.versions, "python": "3.12.1"}),
            r"has python 3.12.1, and here it is 3.11.7: use Py",
        ),
        (
            replace(THERE, versions={**HERE.versions, "torch": "2.8.0"}),
            r"has torch 2.8.0, .*pip install 'torch==2.13.0'",
        ),
        (replace(THERE, versions={**HERE.versions, "verl": None}), r"has verl not installed, and here it is 0.9.1"),
        (replace(THERE, missing=["/models/mine"]), r"does not see '/models/mine' \(model.path or run_dir\): .*share"),
        (replace(THERE, unreached="http://10.0.0.1:81: refused"), r"cannot reach .*10.0.0.1:81: refused.*gateway.host"),
        (replace(THERE, disk_free=10), r"has 0.0 GB free at run_dir, and checkpoints take .*lower keep_checkpoints"),
    ],
)
def test_a_node_that_will_not_do_is_told_with_the_setting_and_the_remedy(
    answer: Answer, told: str, model: Path
) -> None:
    with pytest.raises(ConfigError, match=f"node 10.0.0.9 {told}"):
        check_node("10.0.0.9", answer, HERE, config_of(model))


def test_a_node_says_what_it_has_and_sees(tmp_path: Path) -> None:
    port = free_port()
    question = Question(
        packages=("rllm", "no-such-package"), folders=(str(tmp_path), "/no/such"), url=f"http://127.0.0.1:{port}"
    )
    answer = answered(question)
    assert re.fullmatch(r"3\.\d+\.\d+", answer.versions["python"] or "")
    assert answer.versions["no-such-package"] is None
    assert list(answer.missing) == ["/no/such"]
    assert answer.disk_free > 0
    assert answer.unreached is not None
    assert f"127.0.0.1:{port}" in answer.unreached


def test_memory_is_worked_out_from_the_models_files(model: Path) -> None:
    assert num_weights(model) == 1006
    (told,) = worker_memory(config_of(model, "verl.workers_per_node=2", "algorithm.kl_coef=0.1"))
    # a worker of two: 1,006 weights x 16 bytes / 2, of the reference x 4 / 2; and 100 tokens x 10 words x 8 bytes
    sizes = {"policy, gradients and optimiser": 8048, "reference": 2012, "logits of 100 tokens": 8000}
    assert all(f"{size / 1e9:.2f} GB {name}" in told for name, size in sizes.items())
    # bfloat16 for the model, and float32 with two means for the workers, three times
    assert checkpoint_bytes(config_of(model, "keep_checkpoints=2")) == 3 * 1006 * (2 + 12)
    assert checkpoint_bytes(config_of(model, "keep_best=eval/reward")) == 4 * 1006 * (2 + 12)
    assert checkpoint_bytes(config_of(model, "model.lora_rank=4")) is None, "an adapter is small"
    assert worker_memory(load_config([])) == []
    assert "not predicted" in worker_memory(load_config(["backend=verl", "model.path=some/hub-id"]))[0]


def test_what_a_resumed_run_has_written_is_not_asked_for_again(model: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, lambda folder: None, {})
    assert checkpoint_bytes(config_of(model, f"run_dir={tmp_path / 'run'}", "keep_checkpoints=2")) == 1006 * (2 + 12)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["verl.workers_per_node=8"], "need 8 GPUs on a node, and no node has them (node 10.0.0.1 has 1 GPU)"),
        (["verl.num_nodes=2"], "need 1 GPU on each of 2 nodes, and 1 node has it (node 10.0.0.1 has 1 GPU)"),
    ],
)
def test_a_cluster_with_too_little_is_told(model: Path, settings: list[str], told: str) -> None:
    node = ClusterNode(id="1", address="10.0.0.1", num_cpus=1, num_gpus=1)
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_room(config_of(model, *settings), [node])


def test_one_is_told_as_one(model: Path) -> None:
    node = ClusterNode(id="1", address="10.0.0.1", num_cpus=1, num_gpus=1)
    config = config_of(model, "rollout.runner=ray", "rollout.max_concurrent=1")
    text = "\n".join(plan(config, [node], {"1": THERE}))
    assert (who_has(["a"]), who_has(["a", "b"])) == ("node a has", "nodes a, b have")
    for told in (
        "Ray cluster of 1 node:",
        "10.0.0.1: 1 CPU, 1 GPU, 1000 GB of disk",
        "training: 1 node x 1 worker, on a GPU, holds the model\n",
        "rollouts: 1 process on the nodes, 1 rollout under way at a time",
    ):
        assert told in text


def test_the_plan_says_what_runs_where_and_how_large_a_step_is(model: Path) -> None:
    nodes = [ClusterNode(id=str(n), address=f"10.0.0.{n}", num_cpus=16, num_gpus=8) for n in (1, 2)]
    answers = {node.id: replace(THERE, gpus=["NVIDIA H100, 81559 MiB"]) for node in nodes}
    config = config_of(model, "verl.num_nodes=2", "verl.workers_per_node=8", "rollout.runner=ray")
    text = "\n".join(plan(config, nodes, answers))
    for told in (
        "Ray cluster of 2 nodes:",
        "10.0.0.2: 16 CPUs, 8 GPUs (NVIDIA H100, 81559 MiB), 1000 GB of disk; python 3.11.7 rllm 0.1.0",
        "training: 2 nodes x 8 workers, a GPU each, hold the model in pieces",
        "sampling: the process of the trainer, on this machine",
        "rollouts: 2 processes on the nodes, 64 rollouts under way at a time",
        "predicted memory of each GPU:",
    ):
        assert told in text
