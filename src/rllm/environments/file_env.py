"""`file:PATH`: the environments named in the column `env` of a data file, with all of their tasks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NoReturn

from rllm.data.dataset import Dataset
from rllm.environments.base.base_env import BaseEnv, prepared_args
from rllm.environments.named import NamedEnvironment, refuse_unknown
from rllm.environments.named import open_env as open_named
from rllm.errors import ConfigError
from rllm.types import JSONMapping

_SPEC = "env_name"
"""Field of a task that names its environment."""


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the tasks of all environments that a file names, each a source of the dataset.

    Args:
        name: a data file, whose rows have the field `env` and no other.
        params: none; each row has its own, `{"env": "reasoning-gym:leg_counting?size=5"}`.

    Raises:
        ConfigError: if a row is not an environment's name, or the environments do not fit together.
    """
    refuse_unknown(params, ())
    rows = Dataset.load(name)
    for number, row in enumerate(rows, start=1):
        if list(row) != ["env"] or not isinstance(row["env"], str):
            raise ConfigError(f"row {number} is {dict(row)!r}: use {{'env': 'SCHEME:NAME?key=value'}} alone")
    specs = [row["env"] for row in rows]
    if twice := next((spec for spec in specs if specs.count(spec) > 1), None):
        raise ConfigError(f"{twice!r} is named twice: name it once, and use data.weights to roll it out more often")
    opened = {spec: _opened(spec) for spec in specs}
    first = opened[specs[0]]
    for spec, each in opened.items():
        if (each.agent_class, each.agent_args) != (first.agent_class, first.agent_args):
            raise ConfigError(f"{spec!r} and {specs[0]!r} have different agents, so they do not fit into one file")
    limits = {each.max_steps for spec, each in opened.items() if each.max_steps > 1 or "max_steps=" in spec} or {1}
    if len(limits) > 1:
        raise ConfigError(f"the environments have different max_steps ({sorted(limits)}): give all of them the same")
    parts = [
        Dataset.of_tasks([{**task, _SPEC: spec} for task in each.tasks], name=each.tasks.name)
        for spec, each in opened.items()
    ]
    return NamedEnvironment(
        tasks=Dataset.concatenate(parts),
        env_class=EnvOfRow,
        agent_class=first.agent_class,
        agent_args=first.agent_args,
        max_steps=limits.pop(),
    )


@cache
def _opened(spec: str) -> NamedEnvironment:
    """Open an environment named by data, which must not name code."""
    scheme, _, name = spec.partition(":")
    if scheme in ("file", "mcp", "tasks", "verifiers") or (scheme == "gymnasium" and ":" in name):
        raise ConfigError(f"env={spec!r}: data cannot name files or code to run; use --env with this name alone")
    named = open_named(spec)
    if named.env_class is None or not named.env_class.is_multithread_safe():
        raise ConfigError(
            f"env={spec!r} makes its own rollouts, or needs a thread of its own, so it cannot share a file; use --env "
            "with it alone"
        )
    return replace(named, env_args=prepared_args(named.env_class, named.env_args))


class EnvOfRow(BaseEnv):
    """The environment that a row names: `from_dict` returns one of its class, never one of this class."""

    @staticmethod
    def from_dict(info: JSONMapping) -> BaseEnv:
        """Return the environment of a row of `open_env`."""
        task = dict(info)
        named = _opened(task.pop(_SPEC))
        assert named.env_class is not None
        return named.env_class.from_dict({**task, **named.env_args})

    def reset(self) -> NoReturn:
        """Never called."""
        raise NotImplementedError

    def step(self, action: object) -> NoReturn:
        """Never called."""
        raise NotImplementedError
