"""`MultiTurnEnvironment`: a task and a fixed number of turns, each with a reward; `SingleTurnEnvironment` has one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

from rllm.environments.base.base_env import BaseEnv, check_reward_fn, load_named_code, split_row, unwrapped
from rllm.errors import ConfigError, EnvError
from rllm.rewards.scoring import as_reward_output, info_of
from rllm.types import JSONMapping, JSONObject


class MultiTurnEnvironment(BaseEnv):
    """Shows the task first, then the observation that `get_reward_and_next_obs` returns for each action.

    The rollout ends with turn `max_turns`, or earlier if a subclass sets `self.done`. The last observation is `{}`.
    """

    def __init__(self, task: Any = None, max_turns: int = 3) -> None:
        """Start no rollout yet; call `reset`.

        Raises:
            ConfigError: if `max_turns` is less than 1.
        """
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns!r}: use at least 1")
        self.task = task
        self.max_turns = max_turns
        self.current_turn = 0
        """Number of turns played."""
        self.done = False
        self.history: list[Any] = []
        """Actions so far."""

    def reset(self, task: Any = None) -> tuple[Any, JSONObject]:
        """Start a new rollout, of another task if one is given; the observation is the task."""
        self.task = self.task if task is None else task
        self.current_turn = 0
        self.done = False
        self.history = []
        return (self.task if self.task is not None else {}), {}

    def step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Play one turn.

        Raises:
            EnvError: if the rollout is over, or `get_reward_and_next_obs` does not return two values.
        """
        if self.done:
            raise EnvError(
                f"{type(self).__name__}.step: the rollout was over after turn {self.current_turn}; call reset"
            )
        action = unwrapped(action)
        self.history.append(action)
        returned = self.get_reward_and_next_obs(self.task, action)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise EnvError(
                f"{type(self).__name__}.get_reward_and_next_obs returned {returned!r}: return (reward, observation)"
            )
        reward, observation = returned
        self.current_turn += 1
        self.done = self.done or self.current_turn >= self.max_turns
        return ({} if self.done else observation), reward, self.done, {}

    @abstractmethod
    def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float | None, Any]:
        """Return the reward of this turn's action and the next observation. A reward of `None` is unscored."""


class SingleTurnEnvironment(MultiTurnEnvironment):
    """Ends with the first answer.

    The step's info has `is_correct` and `reward_metadata` from the reward function.
    """

    def __init__(self, task: Any = None, reward_fn: Callable[[Any, Any], Any] | None = None) -> None:
        """Score the answer with `reward_fn(task, action)`; without it, the answer stays unscored."""
        super().__init__(task, max_turns=1)
        self.reward_fn = reward_fn
        self._reward_info: JSONObject = {}

    prepare_args = staticmethod(load_named_code)

    @classmethod
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a row: its `reward_fn`, and its `task` or else the rest of the row.

        Raises:
            ConfigError: if there is no `reward_fn`.
        """
        task, settings = split_row(info)
        env = cls(task, **settings)
        if cls.get_reward_and_next_obs is SingleTurnEnvironment.get_reward_and_next_obs:
            check_reward_fn(env)
        return env

    @classmethod
    def check_task(cls, task: JSONMapping) -> None:
        """Raise `ConfigError` if the task has no usable `reward_fn`."""
        cls.from_dict(task)

    def step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Score the answer.

        Raises:
            RewardError: if the reward function raises or does not return a reward; the message names it.
        """
        observation, reward, done, info = super().step(action)
        return observation, reward, done, info | self._reward_info

    def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float | None, Any]:
        if self.reward_fn is None:
            return None, {}
        verdict = as_reward_output(self.reward_fn, task, action)
        self._reward_info = info_of(verdict)
        return verdict.reward, {}
