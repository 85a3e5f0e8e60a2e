from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.trainer.credit import assemble
from rllm.types import Episode, Trajectory

Example = Callable[[str, str], ModuleType]

TASK = {"question": "Make 12 of 9 and 3.", "target": 12, "nums": [9, 3]}
RIGHT, WRONG = "<answer>9 + 3</answer>", "<answer>9 * 3</answer>"


async def rollouts(agent: ModuleType, scripted: ScriptedEngine, count: int) -> list[Episode]:
    """Return the episodes of `TASK`, through the gateway."""
    store = MemoryTraceStore()
    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        attempts = [RolloutRequest(task=TASK, task_id="task", index=index) for index in range(count)]
        async with agent.client:
            with AgentFunctionEngine(agent.solve_and_judge, gateway=gateway, store=store) as engine:
                return await RolloutRunner(engine, max_concurrent=1).run(attempts)


def tokens_of(trajectory: Trajectory) -> str:
    (step,) = trajectory.steps
    return decode(step.response_ids)


async def test_roles_are_rewarded_for_their_own_tokens_and_compared_among_themselves(example: Example) -> None:
    solvers = iter([RIGHT, WRONG, WRONG, RIGHT])
    judges = iter([f"Maybe {RIGHT}", f"Maybe {WRONG}"])

    agent = example("solver_judge", "agent")

    def model(messages: list[dict[str, Any]]) -> str:
        return next(solvers if messages[0]["content"] == agent.SOLVE else judges)

    episodes = await rollouts(agent, ScriptedEngine(model), count=2)
    for episode in episodes:
        assert [path.name for path in episode.trajectories] == ["solver", "solver", "judge"]
        assert [path.reward for path in episode.trajectories] == [
            float(RIGHT in tokens_of(path)) for path in episode.trajectories
        ]
    assert [episode.is_correct for episode in episodes] == [True, False], "an episode is right if its judge is"
    assembled = assemble(episodes, GRPO(normalize_std=False), step=0, temperature=1.0)
    assert [credit.group_id for credit in assembled.credits] == ["task/solver", "task/solver", "task/judge"] * 2
    assert [credit.advantage for credit in assembled.credits[2::3]] == [0.5, -0.5]


async def test_judge_without_a_verdict_selects_nothing(example: Example) -> None:
    agent = example("solver_judge", "agent")

    def model(messages: list[dict[str, Any]]) -> str:
        return WRONG if messages[0]["content"] == agent.SOLVE else RIGHT

    (episode,) = await rollouts(agent, ScriptedEngine(model), count=1)
    assert [path.reward for path in episode.trajectories] == [0.0, 0.0, 0.0]


def test_demonstrations_have_the_format_of_the_roles(example: Example) -> None:
    offline = example("solver_judge", "offline")
    tasks = {task["question"]: task for split in offline.tasks(seed=0) for task in split}
    for system, user, assistant in islice(offline._conversations(0, works_it_out=1.0), 40):
        question, *proposals = user["content"].splitlines()
        assert len(proposals) == {offline.SOLVE: 0, offline.JUDGE: 2}[system["content"]]
        assert countdown_reward_fn(tasks[question], assistant["content"]).reward == 1.0


def test_rewards_are_averaged_by_role(example: Example) -> None:
    def episode(*rewards: float) -> Episode:
        return Episode(trajectories=[Trajectory(reward=reward) for reward in rewards])

    rewards_by_role = example("solver_judge", "train").rewards_by_role
    assert rewards_by_role([episode(1.0, 0.0, 1.0), episode(0.0, 1.0, 0.0), episode(0.0, 0.0, 0.0)]) == {
        "solver": 2 / 6,
        "judge": 1 / 3,
        "judge, where a solver is right": 1 / 2,
    }


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("solver_judge", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.5
    assert last["eval/accuracy"] >= 0.8
