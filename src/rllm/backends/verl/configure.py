"""What can be said against a configuration before a cluster is joined, and what else of it the backend needs."""

from __future__ import annotations

import os
from typing import Any

from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.backends.verl.cluster import Demand
from rllm.backends.verl.losses import MEAN_OF_SEQUENCES
from rllm.backends.verl.sampler import check_sampler
from rllm.backends.verl.settings import needs_critic, on_cpu, user_keys
from rllm.backends.verl.versions import check_versions, is_before
from rllm.config.schema import refuse_changes
from rllm.engine.ray_cluster import check_address
from rllm.errors import ConfigError
from rllm.inference.local.loading import check_source, is_adapter
from rllm.parser.tool_parser import DEFAULT_FORMAT, tool_parser
from rllm.parser.tool_prompt import TemplateChoice


def check(config: Any) -> None:
    """
    Raises:
        ConfigError: naming the setting, its value and the remedy.
        MissingDependencyError: if verl or Ray is not installed.
    """
    check_settings(config)
    check_versions()
    from rllm.backends.verl.compose import compose

    compose(config)
    if config.verl.policy_loss is not None:
        _check_known(config.verl.policy_loss, environment_of(config))
        _check_mean(config.verl.policy_loss, algorithm_of(config).aggregation)
    check_address(config.verl.ray_address, key="verl.ray_address")


def check_settings(config: Any) -> None:
    """The part that needs neither verl nor Ray.

    Raises:
        ConfigError: naming the setting, its value and the remedy.
    """
    check_source(config.model.path)
    if is_adapter(config.model.path):
        raise ConfigError(
            f"model.path={config.model.path!r} is a LoRA adapter, which verl's workers cannot begin from: make a model of it and the "
            "one that it is for, with `rllm export RUN --model FOLDER`, or peft's merge_and_unload(), and name that"
        )
    tool_parser(config.model.tool_parser or DEFAULT_FORMAT)
    TemplateChoice.of(config.model).read()
    on_cpu(config)
    user_keys(config)
    check_sampler(config)
    name = name_of(config.algorithm)
    if not config.model.lora_rank:
        refuse_changes(config.model, "model", ("lora_alpha", "lora_targets"), "without an adapter; set model.lora_rank")
    elif "all-linear" in config.model.lora_targets and not isinstance(config.model.lora_targets, str):
        raise ConfigError(
            f"model.lora_targets={config.model.lora_targets}: verl adapts layers by name, or all-linear alone; use "
            "backend=local to adapt other weights, too"
        )
    elif needs_critic(config):
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank}: here {name} trains all weights: use 0, or backend=local"
        )
    if not needs_critic(config):
        refuse_changes(config.critic, "critic", type(config.critic).model_fields, f"because {name} has no critic")
    if config.verl.policy_loss is not None and kind_of(config.algorithm).demonstrated:
        raise ConfigError(
            f"verl.policy_loss={config.verl.policy_loss!r}: {name} has no probability ratio that it is a loss of; leave it out"
        )


def _check_known(policy_loss: str, environment: dict[str, str]) -> None:
    """Look the loss up in verl, whose code that imports."""
    os.environ.update(environment)
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if policy_loss not in POLICY_LOSS_REGISTRY:
        raise ConfigError(
            f"verl.policy_loss={policy_loss!r}: verl has no such loss; use one of {', '.join(sorted(POLICY_LOSS_REGISTRY))}"
        )


def _check_mean(policy_loss: str, aggregation: str) -> None:
    """Beside a loss that is always the same mean, the weights of a batch would be those of another."""
    obeys_from = MEAN_OF_SEQUENCES.get(policy_loss, "0")
    if aggregation != "seq-mean-token-mean" and (obeys_from is None or is_before("verl", obeys_from)):
        raise ConfigError(
            f"algorithm.aggregation={aggregation!r}: verl.policy_loss={policy_loss} is a mean over sequences in the verl that is "
            "installed, whatever this says: set algorithm.aggregation=seq-mean-token-mean"
            + (f", or install verl {obeys_from}" if obeys_from else "")
        )


def demand_of(config: Any) -> Demand:
    """What the run needs of a cluster."""
    verl = config.verl
    return Demand(
        num_nodes=verl.num_nodes,
        workers_per_node=verl.workers_per_node,
        resource="CPU" if on_cpu(config) else "GPU",
    )


def environment_of(config: Any) -> dict[str, str]:
    """Variables of every process that runs verl, this one included."""
    defaults = {"VERL_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    always = {name: os.environ.get(name, value) for name, value in defaults.items()}
    if not on_cpu(config):
        return always
    return {
        **always,
        "VERL_USE_EXTERNAL_MODULES": "rllm.backends.verl.platform_cpu",
        "VERL_PLATFORM": "cpu",
        # verl lists its FSDP engines under the GPUs they were written for; they run on any device that torch knows.
        "VERL_ENGINE_DEVICE": "cuda",
    }
