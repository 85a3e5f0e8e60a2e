"""A dataset's row, with the engine's `env_args` added, to an environment's task and reward function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError
from rllm.registry import load_object


def split_row(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task, which is the row's `task` or else all of the row, and its `reward_fn` as an argument, if it has one: a function
    or `package.module:name`.

    Raises:
        ConfigError: if the `reward_fn` cannot be called.
    """
    rest = dict(row)
    reward_fn = rest.pop("reward_fn", None)
    task = rest.get("task", rest)
    if reward_fn is None:
        return task, {}
    if isinstance(reward_fn, str):
        reward_fn = load_object(reward_fn, kind="reward_fn")
    if not callable(reward_fn):
        raise ConfigError(f"reward_fn={reward_fn!r}: use a function of (task, action)")
    return task, {"reward_fn": reward_fn}


def check_reward_fn(env: Any) -> None:
    """Raise `ConfigError` if an environment has a reward function neither from its row nor of its own."""
    if env.reward_fn is None:
        raise ConfigError(
            f"{type(env).__name__}: the task has no reward_fn: give env_args.reward_fn, a function of (task, action); one "
            "that returns None leaves rollouts unscored"
        )
