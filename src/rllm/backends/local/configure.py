"""A `TrainConfig` to the settings of the local backend's parts; what would have no effect is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.backends.adapter import LoraSettings
from rllm.backends.local.critic import CriticSettings
from rllm.backends.local.optimizer import OptimizerSettings
from rllm.backends.refusals import refuse_changes
from rllm.backends.sampling.serving import check_serving
from rllm.backends.schedule import decay_steps
from rllm.errors import ConfigError
from rllm.inference.local.loading import check_source, choose_device, is_adapter
from rllm.parser.tool_parser import DEFAULT_FORMAT, tool_parser
from rllm.parser.tool_prompt import TemplateChoice


def check(config: Any) -> None:
    """What can be said against a configuration before its model is loaded.

    Raises:
        ConfigError: naming the setting, its value and the remedy.
    """
    check_source(config.model.path)
    choose_device(config.model.device)
    tool_parser(config.model.tool_parser or DEFAULT_FORMAT)
    TemplateChoice.of(config.model).read()
    lora_settings(config)
    critic_settings(config)
    _check_reference(config)
    check_serving(config)
    refuse_changes(config.verl, "verl", type(config.verl).model_fields, "without its workers; set backend=verl, too")


def optimizer_settings(config: Any) -> OptimizerSettings:
    """AdamW's, with a schedule over the updates of the run."""
    optim = config.optim
    names = {item.name for item in fields(OptimizerSettings)} & type(optim).model_fields.keys()
    settings = OptimizerSettings(**{name: getattr(optim, name) for name in names} | {"lr": optim.rate})
    steps = decay_steps(config)
    return settings if steps is None else replace(settings, decay=optim.schedule, decay_steps=steps)


def lora_settings(config: Any) -> LoraSettings | None:
    """The adapter's, if there is to be one.

    Raises:
        ConfigError: if there is none, and something is said about it; or if it would be one beside another.
    """
    model = config.model
    if model.lora_rank and is_adapter(model.path):
        raise ConfigError(
            f"model.lora_rank={model.lora_rank}: model.path={model.path!r} is a LoRA adapter itself, and a new one names the model "
            "below both, so whoever loads it would miss the first: make a model of that with `rllm export RUN --model FOLDER`, or "
            "peft's merge_and_unload(), and name that"
        )
    if model.lora_rank:
        return LoraSettings(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)
    refuse_changes(model, "model", ("lora_alpha", "lora_targets"), "without an adapter; set model.lora_rank, too")
    return None


def _check_reference(config: Any) -> None:
    """
    Raises:
        ConfigError: if something is said about a second model that there is not.
    """
    model = config.model
    if model.lora_rank:
        why = "with an adapter (model.lora_rank), since the reference is the policy without it; leave it out"
        refuse_changes(model, "model", ("reference_offload",), why)
    elif model.reference_offload and not algorithm_of(config).needs_reference:
        refuse_changes(model, "model", ("reference_offload",), "without a reference; set algorithm.kl_coef, too")


def critic_settings(config: Any) -> CriticSettings:
    """The critic's.

    Raises:
        ConfigError: if the algorithm has none, and something is said about it.
    """
    critic = config.critic
    if not kind_of(config.algorithm).needs_values:
        why = f"because {name_of(config.algorithm)} has no critic; leave it out"
        refuse_changes(critic, "critic", type(critic).model_fields, why)
    return CriticSettings(**critic.model_dump())
