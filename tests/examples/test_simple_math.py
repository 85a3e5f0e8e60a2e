from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.rewards.reward_fn import math_reward_fn
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode

Example = Callable[[str, str], ModuleType]

SUM = {"question": "What is 7 + 5 + 4?", "ground_truth": "16"}
WORKED_OUT = "7 + 5 = 12\n12 + 4 = 16\n\\boxed{16}"


async def test_reward_of_an_answer_is_on_its_tokens(example: Example) -> None:
    agent = example("simple_math", "agent")
    store = MemoryTraceStore()
    scripted = ScriptedEngine([WORKED_OUT, r"It is \boxed{19}", "About 16"])
    with agent.client, GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        attempts = [RolloutRequest(task=SUM, task_id="sum", index=index) for index in range(3)]
        with AgentFunctionEngine(agent.solve, gateway=gateway, store=store) as engine:
            episodes = await RolloutRunner(engine, max_concurrent=1).run(attempts)
    rewards = {decode(path.steps[0].response_ids): path.reward for item in episodes for path in item.trajectories}
    assert rewards == {WORKED_OUT: 1.0, r"It is \boxed{19}": 0.0, "About 16": 0.0}


def test_demonstrations_have_the_format_of_the_agent(example: Example) -> None:
    offline = example("simple_math", "offline")
    tasks = {task["question"]: task for split in offline.tasks(seed=0) for task in split}
    assert len(tasks) == 1000
    for system, user, assistant in islice(offline._conversations(0, works_it_out=1.0), 20):
        assert system["content"] == example("simple_math", "agent").SYSTEM
        assert math_reward_fn(tasks[user["content"]], assistant["content"]).reward == 1.0


def test_held_out_sums_are_not_trained_on(example: Example) -> None:
    train, held_out = example("simple_math", "offline").tasks(seed=1)
    assert (len(train), len(held_out)) == (900, 100)
    assert not [task for task in held_out if task in train]


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("simple_math", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.5
    assert last["eval/accuracy"] >= 0.85
