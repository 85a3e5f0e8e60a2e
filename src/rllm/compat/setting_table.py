"""Meaning of the keys of the rLLM framework's `agent_ppo_trainer.yaml`: by our settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from rllm.algorithms import ALGORITHMS
from rllm.tracking import EXTRAS, TRACKERS
from rllm.types import JSONMapping

Given: TypeAlias = JSONMapping
"""All keys of the framework that the user set, with their values."""


@dataclass(frozen=True)
class Sets:
    """Rule of a key that is a setting of ours.

    `convert(value, given)` raises ValueError for values without a meaning here.
    """

    setting: str
    convert: Callable[[Any, Given], Any] = lambda value, given: value
    left_out: Callable[[Any], list[Any]] = lambda value: []
    """Parts of the value that have no meaning here."""
    also: Callable[[Any, Given], JSONMapping] = lambda value, given: {}
    """Further settings of ours that the value determines."""


@dataclass(frozen=True)
class Refused:
    """Rule of a key that would change training in an unsupported way: only values that disable it are accepted."""

    unless: tuple[Any, ...]
    remedy: str


@dataclass(frozen=True)
class PartOf:
    """Rule of a key that configures a feature which `switch` turns on; only the switch is translated."""

    switch: str


@dataclass(frozen=True)
class Ignored:
    """Rule of a key for the machinery of other backends, which cannot change what is learnt."""


@dataclass(frozen=True)
class ForVerl(Sets):
    """Rule of a key that is a setting of ours with backend=verl, and ignored by other backends."""


Rule: TypeAlias = Sets | Refused | PartOf | Ignored


def whole(value: object) -> int:
    """Return a whole number as an integer; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise ValueError("use a whole number")
    return int(value)


def text(value: object, given: Given) -> str:
    """Return a name as text, even if it looks like a number."""
    return str(value)


def unless(key: str) -> Callable[[Any, Given], Any]:
    """Return a conversion that drops the value if another key decides."""
    return lambda value, given: None if key in given else value


def at_least_zero(value: object, given: Given) -> int:
    """Return 0 for -1, both of which mean never."""
    return max(whole(value), 0)


def minibatches(value: object, given: Given) -> int:
    """Return the number of updates of a batch, given the number of tasks in an update."""
    if "data.train_batch_size" not in given:
        raise ValueError("it divides data.train_batch_size, which is not set: set that, too")
    size, batch = whole(value), whole(given["data.train_batch_size"])
    if size < 1 or batch % size:
        raise ValueError(f"it does not divide data.train_batch_size={batch}: use a divisor of it")
    return batch // size


def generated(value: object, given: Given) -> int:
    """Return the number of tasks trained on, given the number rolled out; only rejection sampling makes them differ."""
    batch, multiplier = given.get("data.train_batch_size", value), given.get("rllm.rejection_sample.multiplier", 1)
    if value not in (batch, whole(batch) * multiplier):
        raise ValueError(f"without rejection sampling it is data.train_batch_size={batch}: leave it out")
    return whole(batch)


def context_length(value: object, given: Given) -> int:
    """Return the limit that prompt and answer share."""
    if "data.max_response_length" not in given:
        raise ValueError("a prompt and its answer share one limit here: set data.max_response_length, too")
    return whole(value) + whole(given["data.max_response_length"])


def run_dir(value: object, given: Given) -> Path:
    """Return the given folder, or runs/<project>/<experiment>."""
    if "trainer.default_local_dir" in given:
        return Path(str(given["trainer.default_local_dir"])).expanduser()
    names = (given.get("trainer.project_name"), given.get("trainer.experiment_name"))
    return Path("runs", *(str(name) for name in names if name is not None))


def estimator(value: object, given: Given) -> Any:
    """Return the name of an algorithm, or the import path of the user's own."""
    value = _ESTIMATORS.get(str(value), value)
    if str(value) not in ALGORITHMS and ":" not in str(value):
        raise ValueError(f"use one of {', '.join(sorted(ALGORITHMS))}, or your own as 'package.module:Name'")
    return value


def kl_in(where: str, coefficient: str) -> Callable[[Any, Given], str | None]:
    """Return a conversion of a switch to the place where the divergence is subtracted."""

    def convert(value: object, given: Given) -> str | None:
        if value and where == "loss" and given.get(_KL_REWARD):
            raise ValueError(f"{_KL_REWARD} is on, too: keep one of the two")
        if value and coefficient not in given:
            raise ValueError(f"the coefficient is missing: set {coefficient}, too")
        return where if value else None

    return convert


def only_with(switch: str) -> Callable[[Any, Given], Any]:
    """Return a conversion that keeps the value only while the switch is on."""
    return lambda value, given: value if given.get(switch) else None


def kl_estimator(value: object, given: Given) -> str | None:
    """Return our name of a KL estimator."""
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(str(value), str(value))
    if name not in ("k1", "k2", "k3"):
        raise ValueError("use kl, mse or low_var_kl")
    return name if given.get(_KL_LOSS) else None


def lora_targets(value: object, given: Given) -> Any:
    """Return the adapted modules; nothing for all linear layers, the default."""
    if not given.get(_LORA) or value == "all-linear":
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def number_format(value: object, given: Given) -> str:
    """Return the format of the forward passes by our name for it."""
    name = _FORMATS.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise ValueError("use bfloat16 or float32: training in other formats is not supported (model.dtype)")
    return name


def fixed_length(value: object, given: Given) -> dict[str, int]:
    """Return the divisor of `seq-mean-token-sum-norm`, which is the length of the padded responses."""
    if value != _FIXED:
        return {}
    if "data.max_response_length" not in given:
        raise ValueError("it divides by data.max_response_length, which is not set: set that, too")
    return {"algorithm.fixed_length": whole(given["data.max_response_length"])}


def same_model(value: object, given: Given) -> None:
    """Accept the policy's own model as the one that the critic begins as."""
    if value != given.get("actor_rollout_ref.model.path"):
        raise ValueError("the critic begins as the policy does: leave it out, or use actor_rollout_ref.model.path")


def step_level(value: object, given: Given) -> str | None:
    """Return "step" if stepwise advantages are on and credited separately."""
    if value not in ("broadcast", "per_step"):
        raise ValueError("use broadcast or per_step")
    return "step" if value == "per_step" and given.get("rllm.stepwise_advantage.enable") else None


def overlong(value: object, given: Given) -> list[str] | None:
    """Return the reasons for ending that are filtered."""
    return _LIMITS if value and not given.get(_FILTERING) else None


def compact(value: object, given: Given) -> list[str] | None:
    """Return the filtered reasons for ending, including the overlong filter's; failures are always filtered."""
    if not value:
        return None
    masks = {reason: given.get(f"rllm.compact_filtering.mask_{reason}", on) for reason, on in _MASKS.items()}
    limits = _LIMITS if given.get("rllm.agent.overlong_filter") else []
    return [reason for reason, on in masks.items() if on or reason in limits]


def trackers(value: object, given: Given) -> list[Any]:
    """Return the JSON lines, which other commands read, and the trackers that exist and are installed."""
    known = [name for name in _names(value) if name in TRACKERS or ":" in str(name)]
    return ["jsonl", *(name for name in known if name != "jsonl" and (name not in EXTRAS or find_spec(name)))]


def unknown_trackers(value: object) -> list[Any]:
    """Return trackers that do not exist here or are not installed; published scripts name some that are optional."""
    lacking = [name for name in _names(value) if name in EXTRAS and find_spec(name) is None]
    unknown = [name for name in _names(value) if str(name) not in TRACKERS and ":" not in str(name)]
    return [*unknown, *(f"{name} (not installed: pip install 'rllm[{name}]')" for name in lacking)]


def _names(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


_LATER = "not supported: leave it off"
_ARGUMENTS = "pass it to AgentTrainer: {}="
_OVERRIDES = "verl.overrides."
_KL_LOSS, _KL_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
_KL_LOSS_COEF, _KL_REWARD_COEF = "actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"
_FILTERING, _REJECTION = "rllm.compact_filtering.enable", "rllm.rejection_sample.enable"
_DISTILL = "rllm.distill.enable"
_LORA = "actor_rollout_ref.model.lora_rank"
_ESTIMATORS = {"gae": "ppo"}
_FIXED = "seq-mean-token-sum-norm"
_FORMATS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_CLIP_LOW, _CLIP_HIGH = "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"
_FSDP = "actor_rollout_ref.actor.fsdp_config"
_NO_FIREWORKS = Refused((), "the backends are local and verl: leave it out, and set backend=verl for many GPUs")
_LIMITS = ["max_prompt_length_exceeded", "max_response_length_exceeded", "max_turns_exceeded"]
_MASKS = {**dict.fromkeys(_LIMITS, True), "env_done": False, "unknown": False}
"""Reasons for ending, and whether the framework masks them by default."""
_RESAMPLE_ROUNDS = 10

_DETAILS = {
    _FILTERING: (
        "mask_max_prompt_length_exceeded mask_max_response_length_exceeded mask_env_done "
        "mask_max_turns_exceeded mask_timeout mask_unknown mask_error"
    ),
    _REJECTION: "multiplier min_trajs_per_group min_partial_solve_tasks",
    _DISTILL: (
        "shared_tokenizer teacher_rollout_args.model teacher_rollout_args.base_url teacher_rollout_args.api_key"
    ),
}
"""Keys that configure what a switch turns on, in its section."""

TABLE: dict[str, Rule] = {
    "data.train_batch_size": Sets("tasks_per_step"),
    "data.gen_batch_size": Sets("tasks_per_step", generated),
    "data.max_prompt_length": Sets("model.max_length", context_length),
    "data.max_response_length": Sets("rollout.max_tokens"),
    "data.return_multi_modal_inputs": Refused((False,), "only text is read: leave it off"),
    "data.seed": Sets("seed"),
    "data.train_files": Refused((), _ARGUMENTS.format("train_dataset")),
    "data.val_files": Refused((), _ARGUMENTS.format("val_dataset")),
    "algorithm.adv_estimator": Sets("algorithm.name", estimator),
    "algorithm.gamma": Sets("algorithm.gamma"),
    "algorithm.lam": Sets("algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": Sets("algorithm.normalize_std"),
    "algorithm.use_kl_in_reward": Sets("algorithm.kl_in", kl_in("reward", _KL_REWARD_COEF)),
    _KL_REWARD_COEF: Sets("algorithm.kl_coef", only_with(_KL_REWARD)),
    "actor_rollout_ref.model.path": Sets("model.path", text),
    "actor_rollout_ref.model.use_remove_padding": ForVerl(f"{_OVERRIDES}actor_rollout_ref.model.use_remove_padding"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Sets("model.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_rank": Sets("model.lora_rank"),
    "actor_rollout_ref.model.lora_alpha": Sets("model.lora_alpha", only_with(_LORA)),
    "actor_rollout_ref.model.target_modules": Sets("model.lora_targets", lora_targets),
    "actor_rollout_ref.actor.strategy": ForVerl(
        f"{_OVERRIDES}model_engine", lambda value, given: None if value in ("fsdp", "fsdp2") else str(value)
    ),
    "actor_rollout_ref.actor.optim.lr": Sets("optim.lr"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Sets("optim.schedule"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Sets("optim.warmup_steps", at_least_zero),
    "actor_rollout_ref.actor.optim.weight_decay": Sets("optim.weight_decay"),
    "actor_rollout_ref.actor.loss_agg_mode": Sets(
        "algorithm.aggregation", lambda value, given: "fixed-length" if value == _FIXED else value, also=fixed_length
    ),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Sets("optim.num_minibatches", minibatches),
    "actor_rollout_ref.actor.ppo_epochs": Sets("optim.num_epochs"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Sets("optim.micro_batch_tokens"),
    "actor_rollout_ref.actor.use_kl_loss": Sets("algorithm.kl_in", kl_in("loss", _KL_LOSS_COEF)),
    _KL_LOSS_COEF: Sets("algorithm.kl_coef", only_with(_KL_LOSS)),
    "actor_rollout_ref.actor.kl_loss_type": Sets("algorithm.kl_estimator", kl_estimator),
    "actor_rollout_ref.actor.entropy_coeff": Sets("algorithm.entropy_coef"),
    "actor_rollout_ref.actor.clip_ratio": Sets(
        "algorithm.clip_low",
        unless(_CLIP_LOW),
        also=lambda value, given: {} if _CLIP_HIGH in given else {"algorithm.clip_high": value},
    ),
    _CLIP_LOW: Sets("algorithm.clip_low"),
    _CLIP_HIGH: Sets("algorithm.clip_high"),
    "actor_rollout_ref.actor.grad_clip": Sets("optim.max_grad_norm"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": ForVerl(
        f"{_OVERRIDES}actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
    f"{_FSDP}.dtype": Sets("model.dtype", number_format),
    f"{_FSDP}.optimizer_offload": ForVerl("optim.offload"),
    **{
        f"{_FSDP}.{name}": ForVerl(f"{_OVERRIDES}{_FSDP}.{name}")
        for name in ("param_offload", "fsdp_size", "forward_prefetch", "offload_policy", "reshard_after_forward")
    },
    "actor_rollout_ref.rollout.n": Sets("rollout.group_size"),
    "actor_rollout_ref.rollout.temperature": Sets("rollout.temperature"),
    "actor_rollout_ref.rollout.top_p": Refused((1,), "training samples from the whole distribution: use 1"),
    "actor_rollout_ref.rollout.top_k": Refused((-1, 0), "training samples from the whole distribution: use -1"),
    "actor_rollout_ref.rollout.max_model_len": Sets("model.max_length", unless("data.max_prompt_length")),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": Sets("model.tool_parser"),
    "actor_rollout_ref.rollout.val_kwargs.n": Sets("eval.num_rollouts"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Sets("eval.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Sets("eval.top_p"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": Sets("eval.top_k"),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": Refused(
        (True,), "use actor_rollout_ref.rollout.val_kwargs.temperature=0"
    ),
    "actor_rollout_ref.ref.fsdp_config.param_offload": ForVerl("model.reference_offload"),
    "critic.optim.lr": Sets("critic.lr"),
    "critic.model.path": Sets("model.path", same_model),
    "trainer.total_epochs": Sets("num_epochs", unless("trainer.total_training_steps")),
    "trainer.total_training_steps": Sets("num_steps"),
    "trainer.critic_warmup": Sets("critic.warmup_steps", at_least_zero),
    "trainer.logger": Sets("trackers", trackers, unknown_trackers),
    "trainer.project_name": Sets("project", text),
    "trainer.experiment_name": Sets("run_dir", run_dir),
    "trainer.default_local_dir": Sets("run_dir", run_dir),
    "trainer.resume_mode": Refused(("disable",), _ARGUMENTS.format("resume") + "True"),
    "trainer.val_before_train": Sets("eval.at_start"),
    "trainer.test_freq": Sets("eval.every", at_least_zero),
    "trainer.save_freq": Sets("save_every", at_least_zero),
    "trainer.max_actor_ckpt_to_keep": Sets("keep_checkpoints"),
    "trainer.n_gpus_per_node": ForVerl("verl.workers_per_node"),
    "trainer.nnodes": ForVerl("verl.num_nodes"),
    "rllm.mask_truncated_samples": Sets("filters.truncated"),
    "rllm.accumulate_reasoning": Refused((False,), _LATER),
    "rllm.disable_thinking": Refused((False,), _LATER),
    "rllm.agent.max_steps": Sets("rollout.max_steps"),
    "rllm.agent.trajectory_timeout": Sets("rollout.timeout_s"),
    "rllm.agent.overlong_filter": Sets("filters.ended_by", overlong),
    "rllm.agent.agent_args": Refused(({},), _ARGUMENTS.format("agent_args")),
    "rllm.env.env_args": Refused(({},), _ARGUMENTS.format("env_args")),
    "rllm.workflow.workflow_args": Refused(({},), _ARGUMENTS.format("workflow_args")),
    "rllm.workflow.n_parallel_tasks": Sets("rollout.max_concurrent"),
    "rllm.workflow.retry_limit": Sets("rollout.num_retries", lambda value, given: max(whole(value) - 1, 0)),
    "rllm.stepwise_advantage.enable": PartOf("rllm.stepwise_advantage.mode"),
    "rllm.stepwise_advantage.mode": Sets("algorithm.level", step_level),
    "rllm.stepwise_advantage.normalize_by_steps": Refused((False,), _LATER),
    "rllm.compact_filtering.enable": Sets("filters.ended_by", compact),
    "rllm.rejection_sample.enable": Sets(
        "rollout.resample_rounds", lambda value, given: _RESAMPLE_ROUNDS if value else None
    ),
    "rllm.rejection_sample.mode": Refused(("none",), f"use {_REJECTION}=true"),
    "rllm.rejection_sample.filter_uniform_groups": Refused((False,), f"use {_REJECTION}=true"),
    _DISTILL: Refused((False,), "use algorithm.name=distill with teacher.path or teacher.url"),
    "rllm.async_training": Refused((False,), "set rollout.max_staleness, the updates by which a rollout may lag"),
    "rllm.sdk.proxy.host": Sets("gateway.host"),
    "rllm.sdk.proxy.port": Sets("gateway.port"),
    "rllm.sdk.store.path": Sets("store", lambda value, given: str(Path(str(value)).expanduser())),
    "rllm.sdk.processing.groupby_key": Refused((), "return trajectories from the agent; their names are the groups"),
    "rllm.sdk.processing.traj_name_key": Refused((), "name trajectories with @trajectory(name=...)"),
    "fireworks.deployment_id": _NO_FIREWORKS,
    "fireworks.model_id_prefix": _NO_FIREWORKS,
    "fireworks.concurrency": _NO_FIREWORKS,
    **{
        f"{switch.removesuffix('enable')}{key}": PartOf(switch)
        for switch, keys in _DETAILS.items()
        for key in keys.split()
    },
}
"""Rules of published keys; those without a rule are `Ignored`.

A key whose default is `{}` stands for everything that the user puts below it.
"""
