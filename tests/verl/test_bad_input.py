"""Impossible settings are reported before anything is allocated: the node, the key, and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.backends.verl import cluster as cluster_module
from rllm.backends.verl.backend import VerlBackend
from rllm.backends.verl.worker_config import compose, worker_configs
from rllm.engine.ray_cluster import joined
from rllm.errors import ConfigError
from rllm.trainer import AgentTrainer
from rllm.trainer.config import TrainConfig, load_config

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

ACTOR = "actor_rollout_ref.actor"


def config_of(model_folder: Path, *overrides: str) -> TrainConfig:
    return load_config(["backend=verl", "model.device=cpu", f"model.path={model_folder}", *overrides])


def test_our_settings_and_user_overrides_reach_verl(model_folder: Path) -> None:
    free = f"{ACTOR}.fsdp_config.reshard_after_forward"
    new = "actor_rollout_ref.model.override_config.attn_implementation"
    config = config_of(
        model_folder,
        "optim.lr=0.5",
        "algorithm.kl_coef=0.1",
        f"verl.overrides.{free}=false",
        f"verl.overrides.{new}=eager",
    )
    configs = worker_configs(config)
    assert sorted(configs) == ["policy", "reference"]
    policy = configs["policy"]
    assert (policy.part.optim.lr, policy.part.fsdp_config.reshard_after_forward) == (0.5, False)
    assert policy.model.override_config.attn_implementation == "eager"
    assert policy.model.path == str(model_folder)


def test_composing_the_config_does_not_import_verl(model_folder: Path) -> None:
    code = (
        "import sys; from rllm.backends.verl.worker_config import compose; from rllm.trainer.config import load_config;"
        f"compose(load_config(['backend=verl', 'model.path={model_folder}'])); print('verl' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"{ACTOR}.optim.betta=1",
            rf"verl\.overrides\.{ACTOR}\.optim\.betta=1: verl has no such key; did you mean .betas",
        ),
        (f"{ACTOR}.no.such=1", "verl has no such key; nor actor_rollout_ref.actor.no"),
        ("model_engine=tpu", "verl.overrides.model_engine='tpu': verl has no such engine"),
    ],
)
def test_unknown_verl_keys_are_rejected(model_folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(config_of(model_folder, f"verl.overrides.{override}"))


def test_unknown_policy_loss_is_rejected_before_a_run(model_folder: Path, tmp_path: Path) -> None:
    config = config_of(model_folder, "verl.policy_loss=vanila", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"verl.policy_loss='vanila'.*vanilla"):
        AgentTrainer(agent_run_func=lambda question: 1.0, train_dataset=[{"question": "?"}], config=config)
    assert not (tmp_path / "run").exists()


def test_too_few_cpus_are_reported_with_the_nodes(cluster: None, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl.workers_per_node=64 .* has 4 CPUs"):
        VerlBackend.from_config(config_of(model_folder, "verl.workers_per_node=64"))


def test_too_few_nodes_are_reported(cluster: None, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl\.num_nodes=2"):
        VerlBackend.from_config(config_of(model_folder, "verl.workers_per_node=2", "verl.num_nodes=2"))


def test_missing_gpus_are_reported(cluster: None, model_folder: Path) -> None:
    config = config_of(model_folder, "model.device=auto", "model.dtype=float32")
    with pytest.raises(ConfigError, match=r"0 GPUs.*model.device=cpu"):
        VerlBackend.from_config(config)


def test_address_of_another_cluster_is_rejected(cluster: None) -> None:
    with pytest.raises(ConfigError, match=r"ray.address='10\.0\.0\.1:6379'"), joined("10.0.0.1:6379"):
        pytest.fail("the program is connected to another cluster")


@pytest.fixture
def occupied(cluster: None) -> Iterator[None]:
    """Another program uses three of the four CPUs."""
    import ray
    from ray.util import placement_group, remove_placement_group

    group: Any = placement_group([{"CPU": 3}])
    ray.get(group.ready(), timeout=300)
    yield
    remove_placement_group(group)


def test_cpus_used_by_others_are_reported(occupied: None, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "FREE_S", 1.0)
    with pytest.raises(ConfigError, match=r"4 CPUs, 1 .*verl.workers_per_node"):
        VerlBackend.from_config(config_of(model_folder, "verl.workers_per_node=2"))
