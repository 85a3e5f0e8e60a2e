"""`BaseEnv`, the protocol of environments, and helpers that turn a dataset row into one.

Rows may come from anybody, so they cannot name code: import paths are only read from `env_args`, which the user wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from rllm.errors import ConfigError, shown
from rllm.registry import load_object
from rllm.types import Action, JSONMapping, JSONObject


class BaseEnv(ABC):
    """The world of one task, for one rollout at a time.

    `reset`, `step`, `close` and `from_dict` may be `async`. Ordinary methods run in a thread, so they may block. A
    class whose `step` is ordinary may also define `async_step`, which the engine then awaits instead.
    """

    idx: Any = None
    """Index of the rollout among its task's rollouts; set by the engine."""

    @abstractmethod
    def reset(self) -> tuple[Any, JSONObject]:
        """Start a new rollout and return (observation, info)."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Perform the action and return (observation, reward, done, info).

        A reward of `None` is unscored, which is not 0. If a limit ended the rollout rather than the task itself,
        `info["truncated"]` is true.
        """

    def close(self) -> None:  # noqa: B027  # most environments hold nothing
        """Release what the environment holds; called once after every rollout, failed ones included."""

    @staticmethod
    @abstractmethod
    def from_dict(info: JSONObject) -> BaseEnv:
        """Return the environment of a task: a row of the dataset with the engine's `env_args` added."""

    @staticmethod
    def prepare_args(env_args: JSONMapping) -> JSONObject:
        """Return the user's `env_args` as `from_dict` takes them; called once, before they are added to any row.

        An environment whose arguments may name code imports it here and refuses such names in `from_dict`: a row comes
        from a dataset, which must not choose the code that runs.
        """
        return dict(env_args)

    @classmethod
    def argument_names(cls) -> Collection[str] | None:
        """Return the names that `env_args` may hold, or `None` if any are accepted.

        Only called on the class that defines `from_dict`, or on a subclass that defines both.
        """
        return None

    @classmethod  # noqa: B027
    def check_task(cls, task: JSONMapping) -> None:
        """Raise `ConfigError` if `from_dict` would refuse this task; called once, before training starts.

        It must be cheap. Only called on the class that defines `from_dict` and `__init__`, or on a subclass that
        defines `check_task` too.
        """

    @staticmethod
    def is_multithread_safe() -> bool:
        """Return whether environments of this class may run in several threads at once.

        If not, all of them run in one thread, one call after another.
        """
        return True


def unwrapped(action: object) -> Any:
    """Return an agent's action: drivers pass either an `Action` or its content."""
    return action.action if isinstance(action, Action) else action


def step_method(env: Any) -> Callable[[Any], Any]:
    """Return the method with which a driver in an event loop steps an environment: `async_step` if there is one."""
    return env.async_step if _matches(type(env), "async_step", "step") else env.step  # type: ignore[no-any-return]


def accepted_arguments(env_class: Any) -> Collection[str] | None:
    """Return the names that `env_args` may hold for an environment class, `None` if any."""
    names: Collection[str] | None = None
    if _matches(env_class, "argument_names", "from_dict"):
        names = env_class.argument_names()
    return names


def check_first_task(env_class: Any, task: JSONMapping) -> None:
    """Raise `ConfigError` if an environment class refuses this row, as far as that is cheap to check."""
    if _matches(env_class, "check_task", "from_dict") and _matches(env_class, "check_task", "__init__"):
        env_class.check_task(task)


def _matches(kind: type, name: str, method: str) -> bool:
    """Return whether a class attribute was written for the method in use: no subclass has replaced only the method."""
    for owner in kind.__mro__:
        if name in vars(owner):
            return True
        if method in vars(owner):
            return False
    return False


def prepared_args(env_class: object, env_args: JSONMapping | None) -> JSONObject:
    """Return `env_args` after the class's `prepare_args`; a class without that method takes them unchanged."""
    prepare = getattr(env_class, "prepare_args", dict)
    prepared: JSONObject = prepare(env_args or {})
    return prepared


def load_named_code(env_args: JSONMapping) -> JSONObject:
    """Return arguments of a ready-made environment with import paths replaced by the objects that they name.

    Raises:
        ConfigError: if an object does not exist.
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
        load_object(f"{module}:__name__", kind="env")  # importing the module registers the id
    return loaded


def split_row(row: JSONMapping) -> tuple[Any, JSONObject]:
    """Return the task and, if the row has one, its `reward_fn` as a keyword argument.

    The task is the row's `task`, or else the whole row.

    Raises:
        ConfigError: if `reward_fn` is not a function.
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


def refuse_code(name: str, value: object) -> None:
    """Raise `ConfigError` for a row that names code to import."""
    raise ConfigError(
        f"{name}={shown(value)} in a task: tasks are data and cannot name code to run; pass it in env_args "
        f"(env_args={{{name!r}: ...}})"
    )


def check_reward_fn(env: Any) -> None:
    """Raise `ConfigError` if an environment has no reward function."""
    if env.reward_fn is None:
        raise ConfigError(
            f"{type(env).__name__}: the task has no reward_fn: pass env_args.reward_fn, a function of (task, action); "
            "it may return None to leave rollouts unscored"
        )
