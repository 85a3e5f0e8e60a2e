"""Training scripts in the published vocabulary: the meaning of each key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rllm.compat.setting_table import TABLE, PartOf, Refused, Sets
from rllm.compat.settings import PUBLISHED, published_defaults, translate
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"

RETRIEVAL_AGENT = [  # the settings of a published launch script, except for its estimator
    "data.train_batch_size=64",
    "data.val_batch_size=512",
    "data.max_prompt_length=4096",
    "data.max_response_length=6144",
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B",
    "actor_rollout_ref.hybrid_engine=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.rollout.temperature=0.7",
    f"+{VLLM}.enable_auto_tool_choice=True",
    f"+{VLLM}.tool_call_parser=hermes",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.8",
    "actor_rollout_ref.rollout.val_kwargs.top_k=20",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "rllm.mask_truncated_samples=False",
    "trainer.critic_warmup=0",
    "trainer.logger=['console','wandb']",
    "trainer.project_name=rag-agent",
    "trainer.experiment_name=2025_11",
    "trainer.val_before_train=False",
    "trainer.save_freq=40",
    "trainer.test_freq=10",
    "trainer.default_hdfs_dir=null",
    "rllm.agent.max_steps=10",
    "trainer.total_epochs=100",
    "rllm.sdk.proxy.host=127.0.0.1",
    "rllm.sdk.proxy.port=4000",
    "rllm.sdk.store.path=/data/rllm-traces.db",
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for section in reversed(key.split(".")):
        value = {section: value}
    return value  # type: ignore[no-any-return]


def test_published_launch_script_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(RETRIEVAL_AGENT)
    assert config.model_dump(exclude_defaults=True) == {
        "run_dir": Path("runs/rag-agent/2025_11"),
        "num_epochs": 100,
        "tasks_per_step": 64,
        "save_every": 40,
        "store": "/data/rllm-traces.db",
        "project": "rag-agent",
        "model": {"path": "Qwen/Qwen3-4B", "max_length": 4096 + 6144, "tool_parser": "hermes"},
        "rollout": {"temperature": 0.7, "max_tokens": 6144, "max_steps": 10},
        "eval": {"at_start": False, "num_rollouts": 2, "temperature": 0.5, "top_p": 0.8, "top_k": 20},
        "algorithm": {"aggregation": "seq-mean-token-sum", "clip_high": 0.28},
        "optim": {"lr": 1e-6, "num_minibatches": 2, "micro_batch_tokens": 24000},
        "gateway": {"port": 4000},
    }
    assert [record.getMessage() for record in caplog.records] == [
        "settings ignored, since they have no effect with backend=local: data.val_batch_size, actor_rollout_ref.hybrid_engine, "
        "actor_rollout_ref.actor.fsdp_config.param_offload, "
        f"{VLLM}.enable_auto_tool_choice, "
        "trainer.logger=wandb (not installed: pip install 'rllm[wandb]')"
    ]


def test_infrastructure_settings_of_published_scripts_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    keys = [
        *("data.filter_overlong_prompts", "data.filter_overlong_prompts_workers", "ray_init.num_cpus"),
        *("actor_rollout_ref.rollout.dtype", "actor_rollout_ref.rollout.calculate_log_probs"),
        *("trainer.use_legacy_worker_impl", "trainer.log_val_generations", "trainer.rollout_data_dir"),
        *("actor_rollout_ref.rollout.max_num_batched_tokens", "actor_rollout_ref.rollout.max_num_seqs"),
        "actor_rollout_ref.actor.checkpoint.save_contents",
    ]
    assert load_config([f"{key}=1" for key in keys]) == TrainConfig()
    assert all(key in caplog.text for key in keys)


def test_published_defaults_do_not_change_ours(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(PUBLISHED) == TrainConfig()
    assert not caplog.records


def test_every_rule_is_of_a_published_key() -> None:
    needs_a_plus = {f"{VLLM}.tool_call_parser"}
    assert published_defaults().keys() | needs_a_plus >= TABLE.keys()


def test_every_rule_targets_an_existing_setting() -> None:
    known = set(leaves(TrainConfig().model_dump()))
    for rule in TABLE.values():
        if isinstance(rule, Sets):
            assert rule.setting in known or rule.setting.startswith(("algorithm.", "verl.overrides."))
        elif isinstance(rule, PartOf):
            assert isinstance(TABLE[rule.switch], Refused | Sets)


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in mapping.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return found


@pytest.mark.parametrize(
    ("overrides", "setting", "value"),
    [
        (["algorithm.adv_estimator=grpo"], "algorithm", {"name": "grpo"}),
        (["algorithm.adv_estimator=my.module:Mine"], "algorithm", {"name": "my.module:Mine"}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "algorithm", {"normalize_std": False}),
        (["algorithm.adv_estimator=grpo", "algorithm.clip_low=0.1"], "algorithm", {"name": "grpo", "clip_low": 0.1}),
        (["actor_rollout_ref.rollout.n=4"], "rollout.group_size", 4),
        (["data.max_response_length=100"], "model.max_length", None),
        (["trainer.total_epochs=3", "trainer.total_training_steps=7"], "num_epochs", None),
        (["trainer.total_epochs=3", "trainer.total_training_steps=7"], "num_steps", 7),
        (["trainer.test_freq=-1"], "eval.every", 0),
        (["trainer.save_freq=-1"], "save_every", 0),
        (["trainer.logger=console"], "trackers", ["jsonl", "console"]),
        (["trainer.logger=[wandb]"], "trackers", ["jsonl"]),
        (["trainer.logger=['my.module:Tracker']"], "trackers", ["jsonl", "my.module:Tracker"]),
        (["trainer.project_name=p"], "project", "p"),
        (["trainer.project_name=p", "trainer.experiment_name=e"], "run_dir", Path("runs/p/e")),
        (["trainer.project_name=p", "trainer.default_local_dir=/data/x"], "run_dir", Path("/data/x")),
        (["rllm.workflow.retry_limit=3"], "rollout.num_retries", 2),
        (["rllm.workflow.n_parallel_tasks=9"], "rollout.max_concurrent", 9),
        (["rllm.agent.trajectory_timeout=30"], "rollout.timeout_s", 30.0),
        (["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=4"], "model.lora_alpha", 4.0),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj]"],
            "model.lora_targets",
            ["q_proj"],
        ),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=true"], "model.gradient_checkpointing", True),
        (["trainer.critic_warmup=3"], "critic.warmup_steps", 3),
        (["rllm.sdk.store.path=~/t.db"], "store", str(Path("~/t.db").expanduser())),
        (["data.train_batch_size=8", "data.gen_batch_size=8"], "tasks_per_step", 8),
        ([f"{VLLM}.tool_call_parser=hermes"], "model.tool_parser", "hermes"),
        (["actor_rollout_ref.model.path=123"], "model.path", "123"),
        (["actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"], "model.dtype", "bfloat16"),
        (["actor_rollout_ref.actor.fsdp_config.dtype=torch.float32"], "model.dtype", "float32"),
        (["actor_rollout_ref.rollout.max_model_len=99"], "model.max_length", 99),
        (["critic.optim.lr=1e-4", "critic.warmup_steps=2"], "critic.lr", 1e-4),
        (["critic.optim.lr=1e-4", "critic.warmup_steps=2"], "critic.warmup_steps", 2),
        (["actor_rollout_ref.model.path=m", "critic.model.path=m"], "model.path", "m"),
        (["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"], "optim.schedule", "cosine"),
    ],
)
def test_published_keys_map_to_our_settings(overrides: list[str], setting: str, value: Any) -> None:
    found: Any = load_config(overrides)
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == value


ACTOR = "actor_rollout_ref.actor"
STEPWISE = "rllm.stepwise_advantage"
LIMITS = ["max_prompt_length_exceeded", "max_response_length_exceeded", "max_turns_exceeded"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=gae"], {"name": "ppo"}),
        (
            ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8"],
            {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8},
        ),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"], {"kl_in": "reward", "kl_coef": 0.1}),
        (["algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.1"], {}),
        ([f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=low_var_kl"], {}),
        (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=low_var_kl"],
            {"kl_in": "loss", "kl_coef": 0.1, "kl_estimator": "k3"},
        ),
        ([f"{ACTOR}.entropy_coeff=0.01"], {"entropy_coef": 0.01}),
        ([f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3"], {"clip_low": 0.1, "clip_high": 0.3}),
        ([f"{ACTOR}.clip_ratio=0.1"], {"clip_low": 0.1, "clip_high": 0.1}),
        (
            [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=64"],
            {"aggregation": "fixed-length", "fixed_length": 64},
        ),
        ([f"{STEPWISE}.enable=true", f"{STEPWISE}.mode=per_step"], {"level": "step"}),
        ([f"{STEPWISE}.enable=false", f"{STEPWISE}.mode=per_step"], {}),
        ([f"{STEPWISE}.enable=true"], {}),
    ],
)
def test_published_keys_change_the_algorithm(overrides: list[str], expected: dict[str, Any]) -> None:
    assert load_config(overrides).algorithm == (expected or TrainConfig().algorithm)


@pytest.mark.parametrize(
    ("overrides", "truncated", "ended_by"),
    [
        (["rllm.mask_truncated_samples=true"], True, []),
        (["rllm.agent.overlong_filter=true"], False, LIMITS),
        (["rllm.compact_filtering.enable=true"], False, LIMITS),
        (
            ["rllm.compact_filtering.enable=true", "rllm.compact_filtering.mask_max_turns_exceeded=false"],
            False,
            LIMITS[:2],
        ),
        (
            ["rllm.compact_filtering.enable=true", "rllm.compact_filtering.mask_env_done=true"],
            False,
            [*LIMITS, "env_done"],
        ),
        (["rllm.compact_filtering.mask_env_done=true"], False, []),
    ],
)
def test_published_keys_set_the_filters_of_episodes(overrides: list[str], truncated: bool, ended_by: list[str]) -> None:
    filters = load_config(overrides).filters
    assert (filters.truncated, filters.ended_by) == (truncated, ended_by)


def test_rejection_sampling_fills_the_batch_in_rounds() -> None:
    assert load_config(["rllm.rejection_sample.enable=true"]).rollout.resample_rounds == 10
    assert load_config(["rllm.rejection_sample.enable=false"]).rollout.resample_rounds == 0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "=0.9: training samples from the whole distribution: use 1"),
        ("algorithm.adv_estimator=magic", "='magic': use one of "),
        ("algorithm.use_kl_in_reward=true", "=True: the coefficient is missing: set algorithm.kl_ctrl.kl_coef, too"),
        (
            "actor_rollout_ref.actor.use_kl_loss=true",
            "=True: the coefficient is missing: set actor_rollout_ref.actor.kl_loss_coef",
        ),
        ("actor_rollout_ref.actor.kl_loss_type=abs", "='abs': use kl, mse or low_var_kl"),
        ("rllm.stepwise_advantage.mode=both", "='both': use broadcast or per_step"),
        ("rllm.disable_thinking=true", "=True: not supported"),
        ("rllm.rejection_sample.mode=episode", "='episode': use rllm.rejection_sample.enable=true"),
        (
            "rllm.async_training.enable=true",
            "=True: set rollout.max_staleness, the updates by which a rollout may lag",
        ),
        ("rllm.agent.agent_args.tools=[x]", "=['x']: pass it to AgentTrainer: agent_args="),
        ("trainer.resume_mode=auto", "='auto': pass it to AgentTrainer: resume=True"),
        ("rllm.sdk.processing.traj_name_key=role", "='role': name trajectories with @trajectory(name=...)"),
        ("data.max_prompt_length=9", "=9: a prompt and its answer share one limit here: set data.max_response_length"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=9", "=9: it divides data.train_batch_size, which is not set"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "='float16': use bfloat16 or float32"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "='seq-mean-token-sum-norm': it divides by"),
        ("critic.model.path=other", "='other': the critic begins as the policy does"),
        ("data.return_multi_modal_inputs=true", "=True: only text is read"),
        ("fireworks.deployment_id=mine", "='mine': the backends are local and verl"),
        ("rllm.distill.enable=true", "=True: use algorithm.name=distill"),
        ("trainer.test_freq=often", "='often': use a whole number"),
        ("trainer.test_freq=.inf", "=inf: use a whole number"),
    ],
)
def test_unsupported_keys_are_rejected(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert str(caught.value).startswith(override.partition("=")[0] + expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=48"],
            "ppo_mini_batch_size=48: it does not divide data.train_batch_size=64",
        ),
        (
            ["data.train_batch_size=64", "data.gen_batch_size=99"],
            "gen_batch_size=99: without rejection sampling it is data.train_batch_size=64",
        ),
        (
            ["actor_rollout_ref.rollout.n=4", "rollout.group_size=8"],
            "n=4: rollout.group_size=8 is the same setting with another value: keep one of the two",
        ),
        (["data.train_batch_size=0"], "data.train_batch_size, here tasks_per_step=0: input should be greater than 0"),
        (
            ["data.train_batch_size=true"],
            "data.train_batch_size, here tasks_per_step=True: true and false are not valid values of this setting",
        ),
        (["actor_rollout_ref.rollout.m=4"], "m is not a setting; did you mean 'actor_rollout_ref.rollout.n'?"),
        (["rllm.sdk.zzz=4"], "rllm.sdk.zzz is not a setting; use one of rllm.sdk.proxy.host"),
        (["trainer=4"], "trainer is not a setting; use one of actor_rollout_ref, data, fireworks, ray_init, rllm, "),
    ],
)
def test_errors_name_the_published_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        translate({"data": {"batch": 1}, "trainer": {"resume_mode": "auto"}, "rllm": {"disable_thinking": True}})
    assert len(str(caught.value).splitlines()) == 3


def test_disabled_feature_logs_nothing_about_its_details(caplog: pytest.LogCaptureFixture) -> None:
    load_config(["rllm.compact_filtering.mask_timeout=False", "rllm.rejection_sample.multiplier=1.0"])
    assert not caplog.records


def test_file_may_mix_both_vocabularies(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"seed": 3, "rollout": {"group_size": 4}, **nested("data.train_batch_size", 2)}))
    config = load_config(path, ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=1"])
    assert (config.seed, config.rollout.group_size, config.tasks_per_step, config.optim.num_minibatches) == (3, 4, 2, 2)


def test_input_mapping_is_not_modified() -> None:
    source = {
        "algorithm": {"adv_estimator": "grpo"},
        "optim": {"beta1": 0.5},
        "actor_rollout_ref": {"actor": {"optim": {"lr": 1}}},
    }
    assert load_config(source).optim.lr == 1
    assert source["optim"] == {"beta1": 0.5}
    assert source["algorithm"] == {"adv_estimator": "grpo"}


def test_unset_keys_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        load_config({"rllm": {"workflow": {"use_workflow": False, "name": None}}})
    assert not caplog.records


def test_verl_infrastructure_keys_require_the_verl_backend() -> None:
    keys = [
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ]
    config = load_config(keys, ["backend=verl"])
    assert (config.verl.workers_per_node, config.verl.num_nodes) == (4, 2)
    assert (config.optim.offload, config.model.reference_offload) == (True, True)
    actor = {"fsdp_config": {"param_offload": True}, "ulysses_sequence_parallel_size": 2}
    assert config.verl.overrides == {"model_engine": "megatron", "actor_rollout_ref": {"actor": actor}}
    assert load_config(keys) == TrainConfig(), "the local backend ignores them"


def test_data_section_may_have_keys_of_both() -> None:
    config = load_config(["data.train_batch_size=8", "data.sampling=difficulty", "data.weights=[2,1]"])
    assert (config.tasks_per_step, config.data.sampling, config.data.weights) == (8, "difficulty", [2.0, 1.0])
    assert load_config({"data": {"sampling": "easy_first"}}).data.sampling == "easy_first"
    assert load_config({"data": {}}).data == load_config().data
    with pytest.raises(ConfigError, match=r"data\.train_batch_sise is not a setting; did you mean"):
        load_config(["data.train_batch_sise=8", "data.sampling=difficulty"])
