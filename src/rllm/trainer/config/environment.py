"""Settings in the environment, where `RLLM__OPTIM__LR=1e-5` means `optim.lr=1e-5`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

logger = logging.getLogger(__name__)

_PREFIX = "RLLM__"
_OTHERS = ("RLLM_STORE",)
"""Variables with the name of a setting that are something else: this one is what `rllm.integrations.litellm` reads."""


def from_environment() -> list[str]:
    """As `key=value`."""
    found = sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIX))
    return [f"{_key(name.removeprefix(_PREFIX))}={value}" for name, value in found]


def _key(name: str) -> str:
    """Dotted; in small letters as all settings are, but for the name of a role, which is the user's own."""
    section, *rest = name.split("__")
    own = rest[:1] if section.lower() == "roles" else []
    return ".".join([section.lower(), *own, *(part.lower() for part in rest[len(own) :])])


def tell_misspelt(keys: Iterable[str]) -> None:
    """Name the variables that nobody reads and that are written almost as one of these settings is, `RLLM_OPTIM_LR`."""
    meant = {_without_underscores(key): key for key in keys}
    for name in sorted(os.environ):
        mine = name.upper().startswith("RLLM_") and not name.startswith(_PREFIX) and name not in _OTHERS
        key = meant.get(_without_underscores(name.upper().removeprefix("RLLM"))) if mine else None
        if key is not None:
            logger.warning(
                "%s of the environment is no setting: for %s it is %s%s",
                name,
                key,
                _PREFIX,
                key.upper().replace(".", "__"),
            )


def _without_underscores(name: str) -> str:
    return name.lower().replace("_", "").replace(".", "")
