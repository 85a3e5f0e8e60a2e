from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.environments.tools.tool_env import ToolEnvironment


def worth_nothing(task: Any, action: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (SingleTurnEnvironment, {"question": "1 + 1?", "reward_fn": worth_nothing}),
        (ToolEnvironment, {"question": "1 + 1?", "reward_fn": worth_nothing}),
        (GridWorldEnv, {"seed": 3}),
        (GymnasiumEnv, {"env": "CartPole-v1"}),
    ],
)
def test_subclass_is_created_from_a_row_without_its_own_from_dict(kind: type[BaseEnv], row: Mapping[str, Any]) -> None:
    mine: type[BaseEnv] = type("Mine", (kind,), {})
    env = mine.from_dict(row)
    assert type(env) is mine
    env.close()


@pytest.mark.parametrize("kind", [SingleTurnEnvironment, ToolEnvironment])
def test_subclass_may_have_its_own_reward(kind: type[SingleTurnEnvironment | ToolEnvironment]) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        def __init__(self, task: Any = None, **kwargs: Any) -> None:
            super().__init__(task, reward_fn=worth_nothing, **kwargs)

    env = Own.from_dict({"question": "1 + 1?"})
    assert (env.task, env.reward_fn) == ({"question": "1 + 1?"}, worth_nothing)


def test_subclass_may_score_by_itself() -> None:
    class Strict(SingleTurnEnvironment):
        def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float, Any]:
            return float(action == task["answer"]), {}

    assert Strict.from_dict({"answer": "2"}).step("2")[1] == 1.0
