"""Settings of a run as verl's keys: keys that our settings decide, and keys that a user may set in addition.

The only place where the two vocabularies correspond. Imports neither verl nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rllm.algorithms.from_config import algorithm_of, kind_of
from rllm.backends.verl.rows import AGGREGATIONS
from rllm.config.schema import TrainConfig
from rllm.config.yaml_file import leaves
from rllm.errors import ConfigError

ACTOR, REFERENCE, MODEL, CRITIC = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
    "critic",
)
ENGINE = "model_engine"
"""verl's key for the engine that runs the models: `dp` is FSDP; others, such as `megatron`, are passed on unchanged."""

UNBOUNDED = 1e9
"""Dual clip that no ratio reaches, for verl's losses, which always have one."""

ELSEWHERE = {
    "algorithm": "advantages are estimated by rllm: set algorithm.name and its settings",
    "data": "tasks come from the datasets that AgentTrainer is given",
    "trainer": "the training loop is rllm's: see num_steps, save_every, eval.every, verl.num_nodes and "
    "verl.workers_per_node",
    "reward": "rewards come from the agent",
    "actor_rollout_ref.rollout": "rollouts are made by rllm's runner: see the sections rollout and eval",
}
"""Sections of verl's that configure parts not used here, and the setting to use instead."""

_MICRO = "set optim.micro_batch_tokens"
_SCHEDULE = "set optim.schedule and optim.warmup_steps"
_CLIP = "set algorithm.clip_low and algorithm.clip_high"
_KL = "set algorithm.kl_coef, algorithm.kl_in and algorithm.kl_estimator"
_OF_LOSSES = {
    "clip_ratio": _CLIP,
    "clip_ratio_low": _CLIP,
    "clip_ratio_high": _CLIP,
    "clip_ratio_c": "set algorithm.dual_clip",
    "loss_agg_mode": "set algorithm.aggregation",
    "policy_loss": "algorithm.name decides the loss; set verl.policy_loss for one of verl's",
    "tau_pos": "set verl.policy_loss=sapo, which reads it",
    "tau_neg": "set verl.policy_loss=sapo, which reads it",
}
"""Keys of an actor that only verl's own losses read (`verl.policy_loss`)."""
INSTEAD = {
    "loss_scale_factor": "set algorithm.fixed_length",
    "cliprange_value": "set algorithm.value_clip",
    "entropy_coeff": "set algorithm.entropy_coef",
    "calculate_entropy": "the entropy is always reported",
    "use_kl_loss": _KL,
    "kl_loss_coef": _KL,
    "kl_loss_type": _KL,
    "ppo_mini_batch_size": "set optim.num_minibatches",
    **dict.fromkeys(
        (
            f"{name}micro_batch_size{suffix}"
            for name in ("ppo_", "forward_", "log_prob_")
            for suffix in ("", "_per_gpu")
        ),
        _MICRO,
    ),
    "forward_max_token_len_per_gpu": _MICRO,
    "grad_clip": "set optim.max_grad_norm, and critic.max_grad_norm",
    "optim.lr_scheduler_type": _SCHEDULE,
    "optim.warmup_style": _SCHEDULE,
    "optim.min_lr_ratio": _SCHEDULE,
    "optim.num_cycles": _SCHEDULE,
    "shuffle": "a batch is trained in its own order",
    "data_loader_seed": "a batch is trained in its own order",
    "rollout_n": "set rollout.group_size",
    "enable": "algorithm.name decides whether there is a critic",
    "profiler": "workers are not profiled",
    "use_torch_compile": "set it in the section fsdp_config",
    "use_remove_padding": f"set {MODEL}.use_remove_padding",
    "use_fused_kernels": f"set {MODEL}.use_fused_kernels",
    "qat": "set it in the section fsdp_config",
    "use_prefix_grouper": "rows are divided among the workers by their lengths",
    "calculate_sum_pi_squared": "no estimator here reads it",
    "freeze_vision_tower": "no engine of verl's reads it",
}
"""Keys of an actor, a reference and a critic that only verl's trainer reads, and the setting to use instead."""

_TOKENIZER = (
    "prompts are rendered and tokens read by the tokenizer in model.path: change it there, or set model.chat_template"
)
OF_A_MODEL = {
    "custom_chat_template": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "lora_adapter_path": "the policy starts as model.path is: merge the adapter into it with peft's merge_and_unload()",
}
"""Keys of a model's section that have no effect here, and the setting to use instead."""
_OF_MEGATRON = {"lora": "only Megatron reads it: set model.lora_rank, model.lora_alpha and model.lora_targets"}


@dataclass(frozen=True)
class Ours:
    """Value of one of verl's keys that a setting of ours decides."""

    setting: str
    """Name of our setting."""
    value: object


def verl_keys(config: TrainConfig) -> dict[str, Ours]:
    """Return the keys of verl's that our settings decide; raise `ConfigError` if verl has no equivalent of one."""
    engine = _given(config).get(ENGINE, "dp")
    optim, critic = config.optim, config.critic
    policy_clip = Ours("optim.max_grad_norm", optim.max_grad_norm)
    critic_clip = Ours("critic.max_grad_norm", critic.max_grad_norm)
    keys = {
        **_model(config),
        **_updates(ACTOR, config, lr=Ours("optim.lr", optim.rate), clip_grad=policy_clip),
        **_updates(CRITIC, config, lr=Ours("critic.lr", critic.lr), clip_grad=critic_clip),
        f"{REFERENCE}.log_prob_use_dynamic_bsz": Ours("optim.micro_batch_tokens", True),
        f"{REFERENCE}.log_prob_max_token_len_per_gpu": Ours("optim.micro_batch_tokens", optim.micro_batch_tokens),
    }
    if config.verl.policy_loss is not None:
        keys |= _loss(config)
    if engine == "dp":
        keys |= _fsdp(config)
    return keys


def user_keys(config: TrainConfig) -> dict[str, object]:
    """Return the keys that the user sets under `verl.overrides`, dotted.

    Raises:
        ConfigError: naming the key, if a setting of ours decides it otherwise, or if it would have no effect here.
    """
    given, ours = _given(config), verl_keys(config)
    for key, value in given.items():
        decides_instead = None if key in ours else _instead_of(key, config)
        if decides_instead is not None:
            raise ConfigError(
                f"verl.overrides.{key}={value!r} would have no effect: {decides_instead}; leave the override out"
            )
        if key in ours and ours[key].value != value:
            decides = ours[key]
            raise ConfigError(
                f"verl.overrides.{key}={value!r} contradicts {decides.setting}, which makes it {decides.value!r}: set "
                f"{decides.setting} instead, and leave the override out"
            )
    return given


def _instead_of(key: str, config: TrainConfig) -> str | None:
    """Return the setting to use instead of a key that has no effect here, or `None` if it has one."""
    if key == ENGINE:
        return None
    for section in (MODEL, f"{CRITIC}.model"):
        if _lies_in(key, section):
            unread = OF_A_MODEL if _given(config).get(ENGINE) == "megatron" else OF_A_MODEL | _OF_MEGATRON
            return _why(key.removeprefix(f"{section}."), unread)
    part = next((name for name in (ACTOR, REFERENCE, CRITIC) if _lies_in(key, name)), None)
    if part is None:
        others = f"only verl's workers are used: see {ENGINE}, {MODEL}, {ACTOR}, {REFERENCE} and {CRITIC}"
        return next((why for section, why in ELSEWHERE.items() if _lies_in(key, section)), others)
    name = key.removeprefix(f"{part}.")
    if part == CRITIC and name == "ulysses_sequence_parallel_size":
        return "verl reads the key of the section fsdp"
    known = {**INSTEAD, **({} if config.verl.policy_loss is not None and part == ACTOR else _OF_LOSSES)}
    return _why(name, known)


def _why(name: str, instead: Mapping[str, str]) -> str | None:
    return next((why for section, why in instead.items() if _lies_in(name, section)), None)


def _lies_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def on_cpu(config: TrainConfig) -> bool:
    """Return whether the workers use CPUs; by default each has a GPU; raise `ConfigError` if another device is set."""
    device = config.model.device
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(
            f"model.device={device!r}: Ray gives each of verl's workers a GPU: use auto, or cpu for no GPUs"
        )
    return bool(device == "cpu")


def weights_dtype(config: TrainConfig) -> str:
    """Return the number format of the sampled and saved model; the trained weights are in float32."""
    dtype: str = config.model.dtype
    if dtype == "auto":
        return "float32" if on_cpu(config) else "bfloat16"
    return dtype


def needs_critic(config: TrainConfig) -> bool:
    """Return whether the algorithm has a critic."""
    return kind_of(config.algorithm).needs_values


def needs_reference(config: TrainConfig) -> bool:
    """Return whether a reference model is needed; with LoRA the policy without its adapter is the reference."""
    return algorithm_of(config).needs_original and not config.model.lora_rank


def _given(config: TrainConfig) -> dict[str, object]:
    return dict(leaves(config.verl.overrides))


def _model(config: TrainConfig) -> dict[str, Ours]:
    model = config.model
    alpha = model.lora_alpha
    if model.lora_rank and alpha != int(alpha):
        raise ConfigError(f"model.lora_alpha={alpha}: verl takes whole numbers only, such as {round(alpha) or 1}")
    folder = Path(model.path).expanduser()
    keys = {
        "path": Ours("model.path", str(folder.absolute()) if folder.is_dir() else model.path),
        "enable_gradient_checkpointing": Ours("model.gradient_checkpointing", model.gradient_checkpointing),
    }
    lora = {
        "lora_rank": Ours("model.lora_rank", model.lora_rank),
        "lora_alpha": Ours("model.lora_alpha", int(alpha)),
        "target_modules": Ours("model.lora_targets", model.lora_targets),
    }
    policy = {f"{MODEL}.{name}": ours for name, ours in {**keys, **lora}.items()}
    return policy | {f"{CRITIC}.model.{name}": ours for name, ours in {**keys, **lora}.items()}


def _updates(part: str, config: TrainConfig, *, lr: Ours, clip_grad: Ours) -> dict[str, Ours]:
    """Return the keys of a model's updates.

    The schedule is constant: the learning rate of each step is sent to the workers (`update.Schedule`).
    """
    optim = config.optim
    return {
        f"{part}.use_dynamic_bsz": Ours("optim.micro_batch_tokens", True),
        f"{part}.ppo_max_token_len_per_gpu": Ours("optim.micro_batch_tokens", optim.micro_batch_tokens),
        f"{part}.ppo_epochs": Ours("optim.num_epochs", optim.num_epochs),
        f"{part}.optim.lr": lr,
        f"{part}.optim.clip_grad": clip_grad,
        f"{part}.optim.weight_decay": Ours("optim.weight_decay", optim.weight_decay),
        f"{part}.optim.betas": Ours("optim.beta1 and optim.beta2", [optim.beta1, optim.beta2]),
        f"{part}.optim.lr_warmup_steps": Ours("optim.warmup_steps", 0),
        f"{part}.optim.lr_warmup_steps_ratio": Ours("optim.warmup_steps", 0.0),
        f"{part}.optim.total_training_steps": Ours("num_steps", config.num_steps),
    }


def _loss(config: TrainConfig) -> dict[str, Ours]:
    """Return keys that verl's own policy losses read; ours read the algorithm itself."""
    algorithm = algorithm_of(config)
    low, high, dual = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    return {
        f"{ACTOR}.policy_loss.loss_mode": Ours("verl.policy_loss", config.verl.policy_loss),
        f"{ACTOR}.clip_ratio": Ours("algorithm.clip_low", low),
        f"{ACTOR}.clip_ratio_low": Ours("algorithm.clip_low", low),
        f"{ACTOR}.clip_ratio_high": Ours("algorithm.clip_high", high),
        f"{ACTOR}.clip_ratio_c": Ours("algorithm.dual_clip", UNBOUNDED if dual is None else dual),
        f"{ACTOR}.loss_agg_mode": Ours("algorithm.aggregation", AGGREGATIONS.get(algorithm.aggregation, "token-mean")),
    }


def _fsdp(config: TrainConfig) -> dict[str, Ours]:
    """Return keys of FSDP's second version, with the number formats of the model's settings."""
    computed = "bf16" if weights_dtype(config) == "bfloat16" or config.optim.autocast else "fp32"
    formats = {"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engines = {f"{ACTOR}.fsdp_config": ACTOR, f"{REFERENCE}.fsdp_config": REFERENCE, f"{CRITIC}.fsdp": CRITIC}
    keys: dict[str, Ours] = {}
    for engine, part in engines.items():
        keys[f"{part}.strategy"] = keys[f"{engine}.strategy"] = Ours("verl.overrides.model_engine", "fsdp2")
        keys[f"{engine}.model_dtype"] = Ours("model.dtype", "fp32")
        keys |= {f"{engine}.mixed_precision.{name}": Ours("model.dtype", value) for name, value in formats.items()}
        keys[f"{engine}.optimizer_offload"] = Ours("optim.offload", config.optim.offload)
        keys[f"{engine}.entropy_checkpointing"] = Ours("algorithm.entropy_coef", True)
        if on_cpu(config):
            keys[f"{engine}.use_torch_compile"] = Ours("model.device", False)
    if config.model.lora_rank:  # the weights below the adapter are model.path's, and do not change
        keys[f"{ACTOR}.checkpoint.save_lora_only"] = Ours("model.lora_rank", True)
    keys[f"{REFERENCE}.fsdp_config.param_offload"] = Ours("model.reference_offload", config.model.reference_offload)
    # On CPUs verl's frozen engine would ask for pinned memory, which only a GPU gives.
    keys[f"{REFERENCE}.fsdp_config.forward_only"] = Ours("model.device", not on_cpu(config))
    return keys
