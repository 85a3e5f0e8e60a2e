"""Our settings translated to verl's keys, without importing verl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.verl.settings import needs_reference, user_keys, verl_keys, weights_dtype
from rllm.backends.verl.worker_config import check_settings, demand_of, environment_of
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

MAPPED: dict[str, tuple[Any, str, Any]] = {
    # setting: (value, verl's key, verl's value), different from the default
    "model.path": ("other", f"{MODEL}.path", "other"),
    "model.gradient_checkpointing": (True, f"{MODEL}.enable_gradient_checkpointing", True),
    "model.lora_rank": (3, f"{MODEL}.lora_rank", 3),
    "model.lora_alpha": (6.0, f"{MODEL}.lora_alpha", 6),
    "model.lora_targets": (["q_proj"], f"{MODEL}.target_modules", ["q_proj"]),
    "model.dtype": ("float32", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "fp32"),
    "model.reference_offload": (True, "actor_rollout_ref.ref.fsdp_config.param_offload", True),
    "model.device": ("cpu", f"{ACTOR}.fsdp_config.use_torch_compile", False),
    "optim.lr": (0.5, f"{ACTOR}.optim.lr", 0.5),
    "optim.weight_decay": (0.25, f"{ACTOR}.optim.weight_decay", 0.25),
    "optim.beta1": (0.5, f"{ACTOR}.optim.betas", [0.5, 0.999]),
    "optim.beta2": (0.75, f"{ACTOR}.optim.betas", [0.9, 0.75]),
    "optim.max_grad_norm": (3.0, f"{ACTOR}.optim.clip_grad", 3.0),
    "optim.micro_batch_tokens": (77, f"{ACTOR}.ppo_max_token_len_per_gpu", 77),
    "optim.num_epochs": (6, f"{ACTOR}.ppo_epochs", 6),
    "optim.offload": (True, f"{ACTOR}.fsdp_config.optimizer_offload", True),
    "critic.lr": (0.5, "critic.optim.lr", 0.5),
    "critic.max_grad_norm": (3.0, "critic.optim.clip_grad", 3.0),
    "verl.policy_loss": ("gspo", f"{ACTOR}.policy_loss.loss_mode", "gspo"),
}


def config_of(*overrides: str) -> TrainConfig:
    return load_config(["backend=verl", "model.path=some/model", *overrides])


@pytest.mark.parametrize("setting", MAPPED)
def test_settings_map_to_verl_keys(setting: str) -> None:
    value, key, answer = MAPPED[setting]
    before, after = verl_keys(config_of()), verl_keys(config_of(f"{setting}={value}"))
    assert key not in before or before[key].value != answer
    assert after[key].value == answer


def test_builtin_verl_losses_get_their_keys() -> None:
    algorithm = ["algorithm.name=dapo", "algorithm.clip_low=0.1", "algorithm.aggregation=seq-mean-token-mean"]
    keys = verl_keys(config_of("verl.policy_loss=vanilla", *algorithm))
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    assert [keys[f"{ACTOR}.{name}"].value for name in names] == [0.1, 0.28, 1e9, "seq-mean-token-mean"]


def test_numbers_that_yaml_reads_as_text_are_converted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{backend: verl, verl: {policy_loss: gspo}, algorithm: {name: gspo, clip_low: 3e-4, kl_coef: 1e-2}}"
    )
    config = load_config(file)
    assert config.algorithm["clip_low"] == "3e-4"
    assert verl_keys(config)[f"{ACTOR}.clip_ratio_low"].value == 3e-4
    assert needs_reference(config)


def test_dtypes_are_those_of_the_local_backend() -> None:
    key = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"
    formats = {
        (): ("bfloat16", "bf16"),
        ("model.device=cpu",): ("float32", "fp32"),
        ("model.device=cpu", "optim.autocast=true"): ("float32", "bf16"),
        ("model.device=cpu", "model.dtype=bfloat16"): ("bfloat16", "bf16"),
    }
    for overrides, (sampled, computed) in formats.items():
        config = config_of(*overrides)
        assert (weights_dtype(config), verl_keys(config)[key].value) == (sampled, computed)


def test_verl_overrides_are_passed_on() -> None:
    config = config_of(f"verl.overrides.{ACTOR}.fsdp_config.param_offload=true")
    assert user_keys(config) == {f"{ACTOR}.fsdp_config.param_offload": True}


def test_verl_loss_options_are_passed_on() -> None:
    own = {f"{ACTOR}.policy_loss.clip_cov_ratio": 0.1, f"{ACTOR}.tau_pos": 2.0}
    overrides = [f"verl.overrides.{key}={value}" for key, value in own.items()]
    assert user_keys(config_of("verl.policy_loss=clip_cov", *overrides)) == own


def test_megatron_has_no_keys_of_fsdp() -> None:
    config = config_of(
        "verl.overrides.model_engine=megatron", f"verl.overrides.{ACTOR}.megatron.tensor_model_parallel_size=2"
    )
    assert not [key for key in verl_keys(config) if "fsdp" in key]
    assert user_keys(config)[f"{ACTOR}.megatron.tensor_model_parallel_size"] == 2


def test_megatron_reads_its_own_section_for_adapters() -> None:
    key = f"{MODEL}.lora.rank"
    assert user_keys(config_of("verl.overrides.model_engine=megatron", f"verl.overrides.{key}=8")) == {
        "model_engine": "megatron",
        key: 8,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"verl.overrides.{ACTOR}.optim.lr=0.1",
            r"verl\.overrides\.actor_rollout_ref\.actor\.optim\.lr=0\.1 contradicts optim\.lr, which makes it 1e-06: set optim\.lr",
        ),
        (f"verl.overrides.{ACTOR}.strategy=fsdp", "contradicts verl.overrides.model_engine, which makes it 'fsdp2'"),
        (
            "verl.overrides.algorithm.adv_estimator=gae",
            "would have no effect: advantages are estimated by rllm: set algorithm",
        ),
        ("algorithm.observation_coef=0.1", r"algorithm\.observation_coef=0\.1: verl's workers compute sampled tokens"),
        ("algorithm.name=otb", r"algorithm\.name='otb': verl's workers do not compute the energies"),
        ("verl.overrides.trainer.nnodes=2", "see num_steps, save_every, eval.every, verl.num_nodes"),
        ("verl.overrides.actor_rollout_ref.rollout.n=4", "rollouts are made by rllm's runner"),
        (f"verl.overrides.{ACTOR}.use_kl_loss=true", "would have no effect: set algorithm.kl_coef"),
        (f"verl.overrides.{ACTOR}.entropy_coeff=0.1", "would have no effect: set algorithm.entropy_coef; leave"),
        (f"verl.overrides.{ACTOR}.clip_ratio=0.5", "would have no effect: set algorithm.clip_low and"),
        (f"verl.overrides.{ACTOR}.policy_loss.loss_mode=gspo", "set verl.policy_loss for one of verl's"),
        (f"verl.overrides.{ACTOR}.ppo_mini_batch_size=4", "would have no effect: set optim.num_minibatches"),
        (f"verl.overrides.{ACTOR}.optim.lr_scheduler_type=cosine", "would have no effect: set optim.schedule"),
        ("verl.overrides.actor_rollout_ref.ref.log_prob_micro_batch_size=1", "set optim.micro_batch_tokens"),
        ("verl.overrides.critic.cliprange_value=0.1", "would have no effect: set algorithm.value_clip"),
        ("verl.overrides.critic.ulysses_sequence_parallel_size=2", "section fsdp"),
        (f"verl.overrides.{MODEL}.custom_chat_template=x", "by the tokenizer in model.path: change it there"),
        (f"verl.overrides.{MODEL}.lora.rank=8", "only Megatron reads it: set model.lora_rank, model.lora_alpha"),
        (f"verl.overrides.{MODEL}.lora_adapter_path=x", "merge_and_unload"),
        (f"verl.overrides.{ACTOR}.use_remove_padding=false", f"set {MODEL}.use_remove_padding"),
        (f"verl.overrides.{ACTOR}.freeze_vision_tower=true", "no engine of verl's reads it"),
        ("verl.overrides.ray_kwargs.ray_init.num_cpus=2", "see model_engine"),
        ("model.device=cuda:1", "use auto, or cpu"),
        ("model.lora_alpha=32", "would have no effect without an adapter; set model.lora_rank"),
        ("model.quantize=int8", "would have no effect on verl's workers; leave it out, or use backend=local"),
        ("optim.name=adamw8bit", "would have no effect on verl's workers; leave it out, or use backend=local"),
        ("critic.lr=0.1", "would have no effect because grpo has no critic"),
        ("model.tool_parser=hermse", "did you mean 'hermes'"),
        ("model.path=no/such/folder", "no such folder"),
    ],
)
def test_unusable_settings_are_rejected(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(config_of(override))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=sft", "verl.policy_loss=vanilla"], "sft has no probability ratio"),
        (
            ["verl.policy_loss=vanilla", "algorithm.aggregation=trajectory-mean-token-mean"],
            r"algorithm\.aggregation='trajectory-mean-token-mean': verl's own policy losses have no such mean",
        ),
        (["model.lora_rank=2", "model.lora_alpha=2.5"], "verl takes whole numbers only, such as 2"),
        (
            ["algorithm.name=ppo", "model.lora_rank=2"],
            "with backend=verl, ppo trains all weights; use 0, or backend=local",
        ),
    ],
)
def test_conflicting_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(config_of(*overrides))


def test_override_with_the_same_value_is_accepted() -> None:
    check_settings(config_of("model.path=owner/name", f"verl.overrides.{ACTOR}.optim.lr=1e-6"))


def test_cluster_resources_of_a_run() -> None:
    gpus = demand_of(config_of("verl.workers_per_node=8", "verl.num_nodes=2"))
    assert (gpus.workers_per_node, gpus.num_nodes, gpus.resource) == (8, 2, "GPU")
    assert demand_of(config_of("model.device=cpu")).resource == "CPU"
    assert "VERL_PLATFORM" not in environment_of(config_of())
    assert environment_of(config_of("model.device=cpu"))["VERL_PLATFORM"] == "cpu"


def test_reference_is_loaded_only_for_a_divergence() -> None:
    assert not needs_reference(config_of())
    assert needs_reference(config_of("algorithm.kl_coef=0.1"))
    assert not needs_reference(config_of("algorithm.kl_coef=0.1", "model.lora_rank=2")), (
        "the reference is the policy without its adapter"
    )


@dataclass(frozen=True, kw_only=True)
class Held(GRPO):
    """Custom algorithm that penalizes the divergence from the reference by default."""

    kl_coef: float = 0.1


def test_algorithm_may_require_a_divergence_by_default() -> None:
    assert needs_reference(config_of(f"algorithm.name={__name__}:Held"))
    assert not needs_reference(config_of(f"algorithm.name={__name__}:Held", "algorithm.kl_coef=0"))


def test_adapter_checkpoint_holds_only_trained_weights() -> None:
    key = f"{ACTOR}.checkpoint.save_lora_only"
    assert key not in verl_keys(config_of())
    assert verl_keys(config_of("model.lora_rank=2"))[key].value is True


def test_adapter_is_rejected_as_the_initial_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path="):
        check_settings(config_of(f"model.path={tmp_path}"))


@pytest.mark.parametrize(
    "setting",
    [
        "workers_per_node=2",
        "num_nodes=2",
        "policy_loss=vanilla",
        "timeout_s=5",
        "overrides.model_engine=megatron",
    ],
)
def test_local_backend_rejects_verl_settings(setting: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config([f"model.path={tmp_path}", f"verl.{setting}"])
    with pytest.raises(
        ConfigError, match=rf"verl\.{setting.partition('=')[0].partition('.')[0]}=.* set backend=verl, too"
    ):
        LocalBackend.check(config)
