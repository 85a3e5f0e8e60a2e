"""Environments by name: `open_env("reasoning-gym:leg_counting?size=500&seed=1")`.

To add a scheme, write a module with a function `open_env(name, params)`, and add its row to `SCHEMES`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from rllm.agents.agent import BaseAgent
from rllm.agents.chat_agent import TextAgent
from rllm.config.schema import SandboxSettings, refuse_changes
from rllm.data.dataset import Dataset
from rllm.environments.base.base_env import BaseEnv
from rllm.errors import ConfigError, EnvError, MissingDependencyError, concerning
from rllm.registry import load_object, search_current_folder, suggestion
from rllm.types import JSONMapping, JSONObject


class Scheme(NamedTuple):
    """A scheme: its module, and the package that it needs."""

    opener: str
    """`module:function`, called with the name and the parameters."""
    about: str
    package: str | None = None
    """Module of the package that it needs."""
    extra: str | None = None
    """Extra that installs it."""
    names: str | None = None
    """`module:function` that returns all names, if the package lists them."""
    has_sandboxes: bool = False
    """True if the settings of the group `sandbox` are among its parameters."""

    @property
    def installed(self) -> bool:
        """Return whether its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


SCHEMES: dict[str, Scheme] = {
    "file": Scheme("rllm.environments.file_env:open_env", "all environments named in the column env of a data file"),
    "gymnasium": Scheme(
        "rllm.environments.gymnasium_env:open_env", "any Gymnasium environment, as text", "gymnasium", "gym"
    ),
    "mcp": Scheme(
        "rllm.environments.mcp_env:open_env", "questions of a file, with the tools of an MCP server", "mcp", "mcp"
    ),
    "openenv": Scheme(
        "rllm.environments.openenv_env:open_env",
        "the environment of an OpenEnv server, by its URL",
        "openenv",
        "openenv",
    ),
    "reasoning-gym": Scheme(
        "rllm.environments.reasoning_gym_env:open_env",
        "generated reasoning tasks of 100 families, scored by their own rules",
        "reasoning_gym",
        "reasoning-gym",
        "rllm.environments.reasoning_gym_env:families",
    ),
    "tasks": Scheme(
        "rllm.tasks.rollouts:open_env", "task folders, which agents work on in sandboxes", has_sandboxes=True
    ),
    "textarena": Scheme(
        "rllm.environments.textarena:open_env",
        "games of one or more players: self-play, or against an opponent",
        "textarena",
        "textarena",
        "rllm.environments.textarena:names",
    ),
    "verifiers": Scheme(
        "rllm.environments.verifiers_env:open_env",
        "environments of the package verifiers, which make their own rollouts",
        "verifiers",
        "verifiers",
    ),
}
"""Schemes by name."""


@dataclass(frozen=True, kw_only=True)
class NamedEnvironment:
    """Tasks, and either a class of environments or a function that makes whole rollouts."""

    tasks: Dataset
    """Rows that hold all that a rollout needs, each with an `id`."""
    env_class: type[BaseEnv] | None = None
    """Created as `env_class.from_dict({**task, **env_args})`, and stepped by an agent."""
    env_args: JSONMapping = field(default_factory=dict)
    agent_class: type[BaseAgent] = TextAgent
    """Agent if the user names none, created as `agent_class(**agent_args)`."""
    agent_args: JSONMapping = field(default_factory=dict)
    max_steps: int = 1
    """Answers of the model in a rollout, unless `rollout.max_steps` is set."""
    agent_run_func: Callable[..., Any] | None = None
    """Instead of `env_class`: makes a rollout by itself, with model calls to `OPENAI_BASE_URL`."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Facts about an environment with its own agent: `agent` and `sandbox`, for the record of an evaluation."""
    uses_model: bool = True
    """False if its own agent makes no model calls."""

    def check_trainable(self) -> None:
        """Raise `ConfigError` if its agent calls no model."""
        if not self.uses_model:
            raise ConfigError(
                f"agent={self.about.get('agent')} calls no model, so there is nothing to train: use another agent of "
                "`rllm list agents`, or `rllm eval`"
            )


def open_env(spec: str, *, sandbox: SandboxSettings | None = None) -> NamedEnvironment:
    """Open an environment by name. Modules that it names may be in the current folder, as with `python -m`.

    Args:
        spec: `SCHEME:NAME?key=value&...`; with parameters of the scheme and of the environment.
        sandbox: settings of sandboxes, which parameters override.

    Raises:
        ConfigError: if the scheme, the name or a parameter is not known.
        MissingDependencyError: if a package is not installed; the message names the extra.
    """
    scheme, _, rest = spec.partition(":")
    with concerning(f"env={spec!r}"):
        known = _known_scheme(scheme)
        name, params = _parts(rest)
    _check_installed(scheme, f"env={spec!r}")
    search_current_folder()
    if sandbox is not None:
        if not known.has_sandboxes:
            refuse_changes(sandbox, "sandbox", type(sandbox).model_fields, f"with env={spec!r}, which starts none")
        params = {**sandbox.parameters, **params}
    try:
        opened: NamedEnvironment = load_object(known.opener, kind="env")(name, params)
    except (ConfigError, EnvError) as error:
        where = "" if known.has_sandboxes else f"env={spec!r}: "  # the error may be about --agent or --sandbox
        raise ConfigError(f"{where}{error}") from error
    return opened


def names_of(scheme: str) -> list[str]:
    """Return all names of a scheme.

    Raises:
        ConfigError: if the scheme is unknown, or its package does not list them.
        MissingDependencyError: if its package is not installed.
    """
    lister = _known_scheme(scheme).names
    if lister is None:
        raise ConfigError(f"the names of {scheme} are not listed; see its own documentation")
    _check_installed(scheme, f"the list of {scheme}")
    names: list[str] = load_object(lister, kind="env")()
    return names


def _known_scheme(scheme: str) -> Scheme:
    if scheme not in SCHEMES:
        hint = suggestion(scheme, SCHEMES)
        raise ConfigError(f"unknown scheme {scheme!r} (environments are SCHEME:NAME?key=value&...): {hint}")
    return SCHEMES[scheme]


def _check_installed(scheme: str, purpose: str) -> None:
    known = SCHEMES[scheme]
    if known.package is not None and not known.installed:
        raise MissingDependencyError.of(known.package, known.extra or scheme, purpose)


def _parts(rest: str) -> tuple[str, dict[str, str]]:
    """Return the name and the parameters, which begin at the last `?`: a name may be a URL with its own."""
    name, _, query = rest.rpartition("?") if "?" in rest else (rest, "", "")
    if not name:
        raise ConfigError("the name is missing: use SCHEME:NAME?key=value&...")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"{query!r} is not a list of parameters: use key=value&...") from error
    keys = [key for key, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"the parameter {twice!r} is given twice: keep one of the two")
    return name, dict(pairs)


def values_of(params: Mapping[str, str]) -> JSONObject:
    """Return the values of parameters: JSON, or else the text itself."""
    return {key: _value_of(text) for key, text in params.items()}


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def take_whole_number(params: dict[str, str], key: str, default: int, *, least: int = 0) -> int:
    """Remove a parameter and return its whole number; raise `ConfigError` if it is not one, or is below `least`."""
    text = params.pop(key, str(default))
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise ConfigError(f"{key}={text}: use a whole number of at least {least}")
    return int(text)


def take_seeded_tasks(name: str, params: dict[str, str]) -> Dataset:
    """Remove `size` (100) and `seed` (0), and return a task for each seed from `seed` on."""
    size, seed = take_whole_number(params, "size", 100, least=1), take_whole_number(params, "seed", 0)
    return Dataset.of_tasks([{"id": f"{name}/{number}", "seed": number} for number in range(seed, seed + size)], name)


def refuse_unknown(params: Collection[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for the first parameter that is not known."""
    for key in params:
        if key not in known:
            raise ConfigError(f"{key} is not a parameter; {suggestion(key, sorted(known))}")
