"""Checks of a run's settings for verl, and verl's configuration of its workers, composed from both projects' settings.

`compose` reads verl's own files, this project's settings (`settings.py`) and the user's overrides.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rllm.algorithms.from_config import algorithm_of, check_critic, kind_of, name_of
from rllm.backends.server_launch import check_serving
from rllm.backends.verl.cluster import Demand, check_versions, is_before
from rllm.backends.verl.rows import AGGREGATIONS, MEAN_OF_SEQUENCES
from rllm.backends.verl.settings import (
    ACTOR,
    CRITIC,
    ENGINE,
    MODEL,
    REFERENCE,
    needs_critic,
    needs_reference,
    on_cpu,
    user_keys,
    verl_keys,
)
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.engine.ray_cluster import check_address
from rllm.errors import ConfigError
from rllm.inference.local.loading import MERGE_IT, check_source, is_adapter
from rllm.parser.tool_parser import DEFAULT_FORMAT, tool_parser
from rllm.parser.tool_prompt import TemplateChoice
from rllm.registry import suggestion

if TYPE_CHECKING:
    from omegaconf import DictConfig

OPEN = ("override_config", "mixed_precision", "override_optimizer_config", "override_transformer_config")
"""Sections in which verl accepts keys that its files do not list."""
_REFERENCE_KEYS = {
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
}
"""Names of a reference's settings in verl's files, and in the class that they become."""


def check(config: TrainConfig) -> None:
    """Check the settings before a cluster is joined; see `TrainingBackend.check`."""
    check_settings(config)
    check_versions()
    compose(config)
    if config.verl.policy_loss is not None:
        os.environ.update(environment_of(config))
        _check_policy_loss(config.verl.policy_loss, algorithm_of(config).aggregation)
    check_address(config.ray.address)


def check_settings(config: TrainConfig) -> None:
    """Check the settings as far as that needs neither verl nor Ray; see `TrainingBackend.check`."""
    algorithm = algorithm_of(config)
    if algorithm.observation_coef:
        raise ConfigError(
            f"algorithm.observation_coef={algorithm.observation_coef}: verl's workers compute sampled tokens only; use "
            "backend=local, or leave it out"
        )
    if algorithm.needs_energies:
        raise ConfigError(
            f"algorithm.name={name_of(config.algorithm)!r}: verl's workers do not compute the energies of tokens; use "
            "backend=local"
        )
    if config.verl.policy_loss is not None and algorithm.aggregation not in AGGREGATIONS:
        raise ConfigError(
            f"algorithm.aggregation={algorithm.aggregation!r}: verl's own policy losses have no such mean; use one of "
            f"{', '.join(AGGREGATIONS)}, or leave out verl.policy_loss={config.verl.policy_loss}"
        )
    template = TemplateChoice.of(config.model)
    check_source(config.model.path, template=template, to_train=True)
    if is_adapter(config.model.path):
        raise ConfigError(
            f"model.path={config.model.path!r} is a LoRA adapter, from which verl's workers cannot start: {MERGE_IT}"
        )
    tool_parser(config.model.tool_parser or DEFAULT_FORMAT)
    template.read()
    on_cpu(config)
    user_keys(config)
    check_serving(without_adapter(config))
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
            f"model.lora_rank={config.model.lora_rank}: with backend=verl, {name} trains all weights; use 0, or "
            "backend=local"
        )
    refuse_changes(config.model, "model", ("quantize",), "on verl's workers; leave it out, or use backend=local")
    refuse_changes(config.optim, "optim", ("name",), "on verl's workers; leave it out, or use backend=local")
    check_critic(config)
    if config.verl.policy_loss is not None and kind_of(config.algorithm).demonstrated:
        raise ConfigError(
            f"verl.policy_loss={config.verl.policy_loss!r}: {name} has no probability ratio for it; leave it out"
        )


def _check_policy_loss(policy_loss: str, aggregation: str) -> None:
    """Check that verl has the loss, and that the aggregation is the loss's own if that has only one; imports verl."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if policy_loss not in POLICY_LOSS_REGISTRY:
        raise ConfigError(
            f"verl.policy_loss={policy_loss!r}: verl has no such loss; use one of "
            f"{', '.join(sorted(POLICY_LOSS_REGISTRY))}"
        )
    obeys_from = MEAN_OF_SEQUENCES.get(policy_loss, "0")
    if aggregation != "seq-mean-token-mean" and (obeys_from is None or is_before("verl", obeys_from)):
        raise ConfigError(
            f"algorithm.aggregation={aggregation!r}: verl.policy_loss={policy_loss} is always a mean over sequences "
            "in the installed verl: set algorithm.aggregation=seq-mean-token-mean"
            + (f", or install verl {obeys_from}" if obeys_from else "")
        )


def demand_of(config: TrainConfig) -> Demand:
    """Return the resources that the run needs of a cluster."""
    verl = config.verl
    return Demand(
        num_nodes=verl.num_nodes,
        workers_per_node=verl.workers_per_node,
        resource="CPU" if on_cpu(config) else "GPU",
    )


def environment_of(config: TrainConfig) -> dict[str, str]:
    """Return environment variables of each process that runs verl, this one included."""
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


def worker_configs(config: TrainConfig) -> dict[str, DictConfig]:
    """Return the configuration of each role's worker, with the sections `model` and `part`.

    Raises:
        ConfigError: if verl does not know a key, or if one contradicts a setting of ours.
    """
    composed = compose(config)
    roles = {"policy": (ACTOR, MODEL)}
    if needs_reference(config):
        roles["reference"] = (REFERENCE, MODEL)
    if needs_critic(config):
        roles["critic"] = (CRITIC, f"{CRITIC}.model")
    return {role: _worker(composed, part, model, role) for role, (part, model) in roles.items()}


def compose(config: TrainConfig) -> DictConfig:
    """Return verl's configuration, resolved, from its files and without its code; raises as `worker_configs` does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    given = user_keys(config)
    engine = given.pop(ENGINE, "dp")
    spec = find_spec("verl")
    assert spec is not None, "versions were checked before"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            composed = hydra_compose("ppo_trainer", overrides=[f"{ENGINE}={engine}"])
    except HydraException as error:
        raise ConfigError(f"verl.overrides.{ENGINE}={engine!r}: verl has no such engine ({error})") from error
    OmegaConf.set_struct(composed, False)
    for key, value in {**{key: ours.value for key, ours in verl_keys(config).items()}, **given}.items():
        section, _, name = key.rpartition(".")
        known = OmegaConf.select(composed, section) if section else composed
        is_open = any(part in OPEN for part in section.split("."))
        if key in given and (known is None or name not in known) and not is_open:
            hint = f"nor {section}" if known is None else suggestion(name, sorted(map(str, known)))
            raise ConfigError(f"verl.overrides.{key}={value!r}: verl has no such key; {hint}")
        OmegaConf.update(composed, key, value, merge=True, force_add=True)
    OmegaConf.resolve(composed)
    return composed


def _worker(composed: DictConfig, part: str, model: str, role: str) -> DictConfig:
    from omegaconf import OmegaConf

    section = OmegaConf.create(OmegaConf.to_container(OmegaConf.select(composed, part)))
    if role == "reference":
        for name, actor_name in _REFERENCE_KEYS.items():
            section[actor_name] = section.pop(name)
        section.optim = OmegaConf.create(OmegaConf.to_container(OmegaConf.select(composed, f"{ACTOR}.optim")))
    if role == "critic":
        section.model = None
    return OmegaConf.create({"part": section, "model": OmegaConf.to_container(OmegaConf.select(composed, model))})


def without_adapter(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a server for merged weights, which knows nothing of adapters."""
    return config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 0})})
