"""`SingleTurnEnvironment`: a task, one answer, and a function that scores it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from rllm.environments.base.base_env import check_reward_fn, load_named_code, split_row
from rllm.environments.base.multi_turn_env import MultiTurnEnvironment
from rllm.rewards.scoring import as_reward_output, info_of
from rllm.types import JSONMapping, JSONObject


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
            RewardError: naming the reward function, if it raises or does not return a reward.
        """
        observation, reward, done, info = super().step(action)
        return observation, reward, done, info | self._reward_info

    def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float | None, Any]:
        if self.reward_fn is None:
            return None, {}
        verdict = as_reward_output(self.reward_fn, task, action)
        self._reward_info = info_of(verdict)
        return verdict.reward, {}
