"""verl's configuration of its workers, composed from its own files, our settings and the user's overrides."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rllm.backends.verl.settings import (
    ACTOR,
    CRITIC,
    ENGINE,
    MODEL,
    REFERENCE,
    needs_critic,
    needs_reference,
    user_keys,
    verl_keys,
)
from rllm.errors import ConfigError

OPEN = ("override_config", "mixed_precision", "override_optimizer_config", "override_transformer_config")
"""Sections into which verl takes keys that its files do not list."""
_OF_A_REFERENCE = {
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
}
"""What verl's files call a reference's settings, and what the class that they become does."""


def worker_configs(config: Any) -> dict[str, Any]:
    """What each role's worker is made from: `model` and `part`, by role.

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


def compose(config: Any) -> Any:
    """All of verl's configuration, resolved. Reads verl's files and imports none of its code.

    Raises:
        ConfigError: as `worker_configs`.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    given = user_keys(config)
    engine = given.pop(ENGINE, "dp")
    spec = find_spec("verl")
    assert spec is not None, "versions were checked"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            composed = hydra_compose("ppo_trainer", overrides=[f"{ENGINE}={engine}"])
    except HydraException as error:
        raise ConfigError(f"verl.overrides.{ENGINE}={engine!r}: verl has no such engine ({error})") from error
    OmegaConf.set_struct(composed, False)
    for key, value in {**{key: ours.value for key, ours in verl_keys(config).items()}, **given}.items():
        _set(composed, key, value, is_users=key in given)
    OmegaConf.resolve(composed)
    return composed


def _set(composed: Any, key: str, value: Any, *, is_users: bool) -> None:
    """Put a value in its place; a user's key must have one.

    Raises:
        ConfigError: if it has none.
    """
    from omegaconf import OmegaConf

    section, _, name = key.rpartition(".")
    known = OmegaConf.select(composed, section) if section else composed
    if is_users and (known is None or name not in known) and not any(part in OPEN for part in section.split(".")):
        raise ConfigError(
            f"verl.overrides.{key}={value!r}: verl has no such key; "
            + (f"nor {section}" if known is None else f"known there: {', '.join(sorted(map(str, known)))}")
        )
    OmegaConf.update(composed, key, value, merge=True, force_add=True)


def _worker(composed: Any, part: str, model: str, role: str) -> Any:
    from omegaconf import OmegaConf

    section = OmegaConf.create(OmegaConf.to_container(OmegaConf.select(composed, part)))
    if role == "reference":
        for name, of_an_actor in _OF_A_REFERENCE.items():
            section[of_an_actor] = section.pop(name)
        section.optim = OmegaConf.create(OmegaConf.to_container(OmegaConf.select(composed, f"{ACTOR}.optim")))
    if role == "critic":
        section.model = None
    return OmegaConf.create({"part": section, "model": OmegaConf.to_container(OmegaConf.select(composed, model))})
