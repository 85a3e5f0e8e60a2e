"""A dataset's row, with the engine's `env_args` added, to an environment's task and reward function.

Rows may come from anybody, so they name no code: an import path is read only in `env_args`, which the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError, shown
from rllm.registry import load_object


def split_row(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the task, which is the row's `task` or else all of the row, and its `reward_fn` as an argument, if it has one.

    Raises:
        ConfigError: if the `reward_fn` is not a function.
    """
    rest = dict(row)
    reward_fn = rest.pop("reward_fn", None)
    task = rest.get("task", rest)
    if reward_fn is None:
        return task, {}
    if isinstance(reward_fn, str):
        refuse_code("reward_fn", reward_fn)
    if not callable(reward_fn):
        raise ConfigError(f"reward_fn={reward_fn!r}: use a function of (task, action)")
    return task, {"reward_fn": reward_fn}


def refuse_code(name: str, value: Any) -> None:
    """Raise ConfigError for a row that names code to import."""
    raise ConfigError(
        f"{name}={shown(value)} in a task: tasks are data and cannot name code to run; give it in env_args "
        f"(env_args={{{name!r}: ...}})"
    )


def named_code(env_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a ready-made environment with import paths replaced by the code that they name.

    Raises:
        ConfigError: if there is no such code.
    """
    loaded = dict(env_args)
    if isinstance(loaded.get("reward_fn"), str):
        loaded["reward_fn"] = load_object(loaded["reward_fn"], kind="reward_fn")
    if isinstance(loaded.get("tools"), list | tuple):
        loaded["tools"] = [
            load_object(tool, kind="tool") if isinstance(tool, str) and ":" in tool else tool
            for tool in loaded["tools"]
        ]
    if isinstance(loaded.get("env"), str) and ":" in loaded["env"]:  # Gymnasium's `module:id`
        module, _, loaded["env"] = loaded["env"].rpartition(":")
        load_object(f"{module}:__name__", kind="env")  # which registers the id
    return loaded


def own_arguments(env_class: Any, env_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `env_args` as an environment class prepares them; a class without `prepare_args` takes them as they are."""
    prepare = getattr(env_class, "prepare_args", dict)
    prepared: dict[str, Any] = prepare(env_args or {})
    return prepared


def check_reward_fn(env: Any) -> None:
    """Raise `ConfigError` if an environment has a reward function neither from its row nor of its own."""
    if env.reward_fn is None:
        raise ConfigError(
            f"{type(env).__name__}: the task has no reward_fn: give env_args.reward_fn, a function of (task, action); one "
            "that returns None leaves rollouts unscored"
        )
