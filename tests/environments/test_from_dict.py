from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.single_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world.env import GridWorldEnv
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
def test_a_subclass_is_made_of_a_row_without_a_from_dict_of_its_own(
    kind: type[BaseEnv], row: Mapping[str, Any]
) -> None:
    mine: type[BaseEnv] = type("Mine", (kind,), {})
    env = mine.from_dict(row)
    assert type(env) is mine
    env.close()
