"""`BaseEnv`: what the engine needs of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class BaseEnv(ABC):
    """One task's world, for one rollout at a time.

    Methods may be `async`; ordinary ones are called in a thread, so they may block.
    """

    idx: Any = None
    """Set by the engine: the rollout's place among its tasks."""

    @abstractmethod
    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin anew; returns (observation, info)."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float | None, bool, dict[str, Any]]:
        """Do the action; returns (observation, reward, done, info).

        A reward of `None` is unscored, which is not 0. Where a limit ended the rollout and not the world itself,
        `info["truncated"]` is true.
        """

    def close(self) -> None:  # noqa: B027  # most environments hold nothing
        """Let go of whatever the environment holds; called once after every rollout, also after a failed one."""

    @staticmethod
    @abstractmethod
    def from_dict(info: dict[str, Any]) -> BaseEnv:
        """The environment of a task: a row of the dataset, with the engine's `env_args` added."""

    @staticmethod
    def prepare_args(env_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's `env_args` as `from_dict` takes them; called once, before they are added to any row.

        An environment whose arguments may name code imports it here, and refuses such names in `from_dict`: a row comes
        from a dataset, which must not choose the code that runs.
        """
        return dict(env_args)

    @staticmethod
    def is_multithread_safe() -> bool:
        """Whether environments of this class may run in different threads at the same time.

        If not, all of them are run in one thread, one call after another.
        """
        return True
