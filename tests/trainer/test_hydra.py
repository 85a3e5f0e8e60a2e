"""hydra composes our published configuration, and AgentTrainer accepts the result, as in the tutorials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, ListConfig, OmegaConf

from rllm.errors import ConfigError
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.config import TrainConfig, load_config

from ..ports import free_port

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"

LAUNCH_SCRIPTS = """
algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.001
data.train_batch_size=32 data.val_batch_size=512 data.max_prompt_length=2048 data.max_response_length=1024
actor_rollout_ref.hybrid_engine=True actor_rollout_ref.model.path=Qwen/Qwen3-4B
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.temperature=0.6 actor_rollout_ref.rollout.top_p=1.0
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.8
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.val_kwargs.temperature=0.6
actor_rollout_ref.rollout.val_kwargs.top_p=0.95 actor_rollout_ref.rollout.val_kwargs.top_k=20
actor_rollout_ref.ref.fsdp_config.param_offload=False actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name=p trainer.experiment_name=e
trainer.val_before_train=False trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=40 trainer.test_freq=10
trainer.total_epochs=100 trainer.default_hdfs_dir=null
rllm.mask_truncated_samples=False rllm.agent.max_steps=10 rllm.workflow.use_workflow=True
rllm.stepwise_advantage.enable=True rllm.stepwise_advantage.mode=broadcast
rllm.compact_filtering.enable=False rllm.compact_filtering.mask_max_prompt_length_exceeded=True
rllm.compact_filtering.mask_max_response_length_exceeded=True rllm.compact_filtering.mask_max_turns_exceeded=False
rllm.compact_filtering.mask_timeout=True rllm.rejection_sample.enable=False rllm.rejection_sample.multiplier=1.0
rllm.sdk.proxy.host=127.0.0.1 rllm.sdk.proxy.port=4000 rllm.sdk.proxy.mode=subprocess
rllm.sdk.proxy.admin_token=secret rllm.sdk.store.path=/tmp/traces.db
rllm.sdk.processing.groupby_key=null rllm.sdk.processing.traj_name_key=null
""".split()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("rllm.trainer.config", version_base=None):
        return compose("agent_ppo_trainer", overrides=list(overrides))


def test_empty_configuration_gives_our_defaults(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(composed()) == TrainConfig()
    assert not caplog.records


def test_launch_scripts_need_a_plus_only_for_server_settings() -> None:
    plus = [f"+{VLLM}.enable_auto_tool_choice=True", f"+{VLLM}.tool_call_parser=hermes"]
    config = load_config(composed(*LAUNCH_SCRIPTS, *plus))
    assert config == load_config([*LAUNCH_SCRIPTS, *plus])
    assert (config.tasks_per_step, config.optim.num_minibatches, config.optim.lr) == (32, 2, 1e-6)


EXAMPLES = """
+actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 +actor_rollout_ref.ref.fsdp_config.model_dtype=bf16
+actor_rollout_ref.ref.fsdp_config.optimizer_offload=False actor_rollout_ref.actor.fsdp_config.dtype=bfloat16
actor_rollout_ref.ref.fsdp_config.dtype=bfloat16 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16
actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.rollout.load_format=safetensors
actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.dtype=bfloat16
actor_rollout_ref.rollout.val_kwargs.temperature=0 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True +trainer.n_training_gpus_per_node=4
trainer.max_actor_ckpt_to_keep=2 trainer.default_local_dir=checkpoints trainer.total_training_steps=100
trainer.use_legacy_worker_impl=disable trainer.save_freq=-1 data.filter_overlong_prompts=True
data.filter_overlong_prompts_workers=32 algorithm.norm_adv_by_std_in_grpo=true rllm.agent.overlong_filter=True
rllm.agent.trajectory_timeout=5400 rllm.env.name=swe rllm.agent.name=sweagent rllm.workflow.n_parallel_tasks=256
rllm.workflow.retry_limit=1 rllm.compact_filtering.enable=True ray_init.num_cpus=64 trainer.log_episodes=True
""".split()
"""Keys that the example programs of version 0.2.1 set besides those of the tutorials, as in their launch scripts."""
NOT_HERE = [
    "fireworks.deployment_id=d",
    "actor_rollout_ref.actor.fsdp_config.dtype=float16",
    "rllm.distill.enable=True",
    "data.return_multi_modal_inputs=True",
]


def test_keys_of_the_published_examples_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(composed(*LAUNCH_SCRIPTS, *EXAMPLES))
    assert (config.model.dtype, config.model.lora_rank, config.rollout.timeout_s) == ("bfloat16", 8, 5400.0)
    assert config.algorithm["fixed_length"] == config.rollout.max_tokens == 1024
    [ignored] = [line for line in caplog.messages if line.startswith("settings ignored")]
    assert "actor_rollout_ref.ref.fsdp_config.model_dtype" in ignored


@pytest.mark.parametrize("override", NOT_HERE)
def test_unsupported_keys_of_an_example_are_rejected_by_name(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(composed(override))
    assert str(caught.value).startswith(override.partition("=")[0])


@pytest.mark.parametrize("override", ["data.train_batch_sizes=3", f"{VLLM}.tool_call_parser=hermes", "optim.lr=1"])
def test_hydra_rejects_unpublished_keys(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        composed(override)


def test_our_settings_are_added_with_a_plus() -> None:
    assert load_config(composed("+rollout.max_concurrent=5", "+algorithm.clip_low=0.1")).rollout.max_concurrent == 5


def test_validation_batch_size_follows_the_training_tasks() -> None:
    assert composed("data.train_batch_size=16", "rllm.rejection_sample.multiplier=2").data.gen_batch_size == 32
    assert composed().data.gen_batch_size is None
    expression = "data.gen_batch_size='${mul:${data.train_batch_size},1}'"
    assert load_config(composed("data.train_batch_size=16", expression)).tasks_per_step == 16


def test_configuration_may_contain_omegaconf_anywhere() -> None:
    whole = OmegaConf.create({"seed": 3, "optim": {"lr": "${seed}"}, "trackers": ["jsonl"]})
    assert load_config(whole) == load_config({"seed": 3, "optim": OmegaConf.create({"lr": 3}), "trackers": ["jsonl"]})
    assert load_config({"trackers": ListConfig(["jsonl"])}).trackers == ["jsonl"]
    assert load_config(ListConfig(["seed=4"])).seed == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [("???", "Missing mandatory value: seed"), ("${nowhere}", "Interpolation key 'nowhere' not found")],
)
def test_unresolvable_omegaconf_is_a_config_error(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(OmegaConf.create({"seed": value}))


TUTORIAL = """
import json
import hydra
from rllm.trainer.agent_trainer import AgentTrainer

async def run_agent(question, ground_truth, **kwargs):
    return 1.0

@hydra.main(config_path="pkg://rllm.trainer.config", config_name="agent_ppo_trainer", version_base=None)
def main(config):
    rows = [{"question": "2 + 2", "ground_truth": "4"}]
    trainer = AgentTrainer(config=config, train_dataset=rows, val_dataset=rows, agent_run_func=run_agent)
    print(json.dumps([config.data.gen_batch_size, trainer.config.model_dump(mode="json")]))

if __name__ == "__main__":
    main()
"""

LATE_OMEGACONF = """
import sys
import rllm.trainer.config
from omegaconf import OmegaConf
print(OmegaConf.create({"a": "${mul:3,4}"}).a)
"""


def run_script(folder: Path, source: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(folder), "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_tutorial_script_runs_with_verl_installed(tmp_path: Path) -> None:
    verl = tmp_path / "verl" / "trainer" / "config"
    verl.mkdir(parents=True)
    for folder in (verl, verl.parent, verl.parent.parent):
        (folder / "__init__.py").touch()
    (verl / "ppo_trainer.yaml").write_text("data: {train_batch_size: 1024}\nelsewhere: 1\n")

    overrides = (
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=32",
        "actor_rollout_ref.model.path=Qwen/Qwen3-4B",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.project_name=simple-math",
        "trainer.experiment_name=grpo-baseline",
    )
    done = run_script(tmp_path, TUTORIAL, *overrides)
    assert done.returncode == 0, done.stderr
    *log, found = done.stdout.splitlines()  # hydra logs to stdout
    generated, config = json.loads(found)
    assert generated == config["tasks_per_step"] == 32
    assert config["run_dir"] == "runs/simple-math/grpo-baseline"
    logged = "\n".join(log)
    assert "backend=local: actor_rollout_ref.rollout.tensor_model_parallel_size" in logged
    assert "tasks_per_step=32" in logged
    assert "optim.lr=1e-06, by model size" in logged


TRAINING = """
import hydra
from rllm.rewards.reward_fn import RewardInput, math_reward_fn
from rllm.sdk.shortcuts import get_chat_client
from rllm.trainer.agent_trainer import AgentTrainer

def rollout(question, ground_truth):
    client = get_chat_client(base_url="http://localhost:4000/v1", api_key="EMPTY")
    response = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return math_reward_fn({"ground_truth": ground_truth}, response.choices[0].message.content).reward

@hydra.main(config_path="pkg://rllm.trainer.config", config_name="agent_ppo_trainer", version_base=None)
def main(config):
    rows = [{"question": f"{i} + 1", "ground_truth": str(i + 1)} for i in range(4)]
    AgentTrainer(config=config, train_dataset=rows, val_dataset=rows, agent_run_func=rollout).train()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_tutorial_trains_without_logging_each_call(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    recipe = TinyPolicyRecipe(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32)
    new_model(tokenizer, recipe).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    port = free_port()
    lengths = ["data.max_prompt_length=100", "data.max_response_length=16"]
    script = TRAINING.replace("4000", str(port))
    run = ["actor_rollout_ref.model.path=model", "data.train_batch_size=4", "trainer.total_epochs=1"]
    done = run_script(tmp_path, script, *run, *lengths, f"rllm.sdk.proxy.port={port}", "trainer.project_name=p")
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert "step 1/1: reward" in log
    assert not any(name in log for name in ("httpx", "httpcore", "openai.", "uvicorn"))
    refused = run_script(tmp_path, script, *run, "data.max_prompt_length=9999", "data.max_response_length=16")
    assert refused.returncode == 1
    assert "data.max_prompt_length, here model.max_length=10015" in refused.stderr


@pytest.mark.slow
def test_resolver_is_registered_in_any_import_order(tmp_path: Path) -> None:
    done = run_script(tmp_path, LATE_OMEGACONF)
    assert (done.stdout, done.stderr) == ("12\n", "")


def test_configurations_need_neither_hydra_nor_omegaconf(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['omegaconf'] = sys.modules['hydra'] = None\n"
    source = (
        hidden
        + "from rllm.trainer.config import load_config; print(load_config(['data.train_batch_size=3']).tasks_per_step)"
    )
    done = run_script(tmp_path, source)
    assert (done.stdout, done.stderr) == ("3\n", "")
