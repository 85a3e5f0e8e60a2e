from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.trainer.credit import assemble
from rllm.types import Message

Example = Callable[[str, str], ModuleType]

AUTOGEN = Path(__file__).parents[2] / ".autogen"
"""Folder into which `make test-examples` installs it, apart from packages in conflict with it."""
TASK = {"question": "Make 12 of 9 and 3.", "target": 12, "nums": [9, 3]}
RIGHT, WRONG = "So <answer>9 + 3</answer>", "Maybe <answer>9 * 3</answer>"


def test_proposer_is_rewarded_for_the_final_answer_of_the_team(example: Example) -> None:
    roles = example("autogen_team", "roles")
    assert roles.proposer_reward([WRONG, RIGHT], TASK) == 1.0
    assert roles.proposer_reward([RIGHT, WRONG], TASK) == 0.0
    assert roles.proposer_reward(["I do not know."], TASK) == 0.0


def test_checker_earns_the_fraction_of_correct_verdicts(example: Example) -> None:
    roles = example("autogen_team", "roles")
    assert roles.checker_reward([WRONG, RIGHT], ["NO", "YES"], TASK) == 1.0
    assert roles.checker_reward([RIGHT, RIGHT], ["NO", "YES"], TASK) == 0.5
    assert roles.checker_reward([WRONG], ["YES"], TASK) == 0.0


def test_demonstrations_have_the_format_of_the_team(example: Example) -> None:
    offline, roles = example("autogen_team", "offline"), example("autogen_team", "roles")
    tasks = {task["question"]: task for split in offline.tasks(seed=0) for task in split}
    for system, user, *talk in islice(offline._conversations(0, works_it_out=1.0), 40):
        expected = ["assistant", "user"] if system["content"] == roles.PROPOSE else ["user", "assistant"]
        assert [message["role"] for message in talk] == list(islice(cycle(expected), len(talk)))
        assert talk[-1]["role"] == "assistant"
        assert all(roles.is_right(message["content"], tasks[user["content"]]) for message in talk[0::2])
        assert all(roles.AGREED in message["content"] for message in talk[1::2])


@pytest.mark.examples
async def test_each_agent_has_a_trajectory_of_its_own_turns(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(AUTOGEN)
    agent = example("autogen_team", "agent")

    def model(messages: list[Message]) -> str:
        if messages[0]["content"] == agent.PROPOSE:
            return WRONG if len(messages) == 2 else RIGHT
        return "NO" if messages[-1]["content"] == WRONG else "YES"

    store = MemoryTraceStore()
    with (
        GatewayServer(store, EngineUpstream(ScriptedEngine(model), "policy")) as gateway,
        AgentFunctionEngine(agent.propose_and_check, gateway=gateway, store=store) as engine,
    ):
        attempts = [RolloutRequest(task=TASK, task_id="task", index=index) for index in range(4)]
        episodes = await RolloutRunner(engine, max_concurrent=4).run(attempts)
    for episode in episodes:
        checker, proposer = episode.trajectories
        assert (checker.name, proposer.name) == ("checker", "proposer")
        assert [decode(step.response_ids) for step in proposer.steps] == [WRONG, RIGHT]
        assert [decode(step.response_ids) for step in checker.steps] == ["NO", "YES"]
        assert (checker.reward, proposer.reward) == (1.0, 1.0)
    assembled = assemble(episodes, GRPO(), step=0, temperature=1.0)
    assert {credit.group_id for credit in assembled.credits} == {"task/checker", "task/proposer"}


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_reward_in_the_readme(
    train: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(AUTOGEN))
    first, *_, last = train("autogen_team", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.4
    assert last["eval/accuracy"] >= 0.65
