"""`SingleTurnEnvironment`: a task, one answer, and a function that says what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from rllm.environments.base.from_task import check_reward_fn, named_code, split_row
from rllm.environments.base.multi_turn_env import MultiTurnEnvironment
from rllm.rewards.scoring import as_reward_output


class SingleTurnEnvironment(MultiTurnEnvironment):
    """Ends with the first answer. The step's info has `is_correct` and `reward_metadata`, as the reward function gave them."""

    def __init__(self, task: Any = None, reward_fn: Callable[[Any, Any], Any] | None = None) -> None:
        """`reward_fn(task, action)` scores the answer; without one, it stays unscored."""
        super().__init__(task, max_turns=1)
        self.reward_fn = reward_fn
        self._reward_info: dict[str, Any] = {}

    prepare_args = staticmethod(named_code)

    @classmethod
    def from_dict(cls, info: Mapping[str, Any]) -> Self:
        """Return the environment of a row: its `reward_fn`, a function, and its `task` or else all the rest of it.

        Raises:
            ConfigError: if there is no `reward_fn`.
        """
        task, settings = split_row(info)
        env = cls(task, **settings)
        if cls.get_reward_and_next_obs is SingleTurnEnvironment.get_reward_and_next_obs:
            check_reward_fn(env)
        return env

    def step(self, action: Any) -> tuple[Any, float | None, bool, dict[str, Any]]:
        """Score the answer.

        Raises:
            RewardError: naming the reward function, if it raises or returns what is no reward.
        """
        observation, reward, done, info = super().step(action)
        return observation, reward, done, info | self._reward_info

    def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float | None, Any]:
        if self.reward_fn is None:
            return None, {}
        verdict = as_reward_output(self.reward_fn, task, action)
        self._reward_info = {"is_correct": verdict.is_correct, "reward_metadata": verdict.metadata}
        return verdict.reward, {}
