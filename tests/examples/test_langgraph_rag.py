from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
from langchain_core.utils.function_calling import convert_to_openai_tool

from rllm.algorithms.reinforce import RLOO
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import Answer, ScriptedEngine, decode
from rllm.trainer.credit import assemble
from rllm.types import Episode, Message, Trajectory

Example = Callable[[str, str], ModuleType]
Model = Callable[[list[Message]], Answer]
RollOut = Callable[..., Awaitable[list[Episode]]]

TASK = {"question": "How many steps has Amber Bay?", "ground_truth": "59"}


@pytest.fixture
def store() -> MemoryTraceStore:
    return MemoryTraceStore()


@pytest.fixture
async def roll_out(
    example: Example, store: MemoryTraceStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RollOut]:
    """`await roll_out(model, ...)`: concurrent episodes of `TASK` with these models."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    agent = example("langgraph_rag", "agent")

    async def run(*models: Model) -> list[Episode]:
        def model(messages: list[Message]) -> Answer:
            return models[int(messages[1]["content"].split()[0])](messages)

        async def ask(number: int, question: str, ground_truth: str) -> float:
            reward: float = await agent.run_agent(
                f"{number} {question}", ground_truth, source="a column of no interest"
            )
            return reward

        attempts = [RolloutRequest(task={"number": n, **TASK}, task_id="t", index=n) for n in range(len(models))]
        upstream = EngineUpstream(ScriptedEngine(model), "policy")
        with (
            GatewayServer(store, upstream) as gateway,
            AgentFunctionEngine(ask, gateway=gateway, store=store) as engine,
        ):
            return await RolloutRunner(engine).run(attempts)

    with agent.model.client:
        async with agent.model.async_client:
            yield run


def path_of(episode: Episode) -> Trajectory:
    assert not episode.failed, episode.info
    (path,) = episode.trajectories
    return path


def calls(tool: str) -> Answer:
    return {"tool_calls": [{"name": tool, "arguments": {"query": "Amber Bay"}}]}


def searching(messages: list[Message]) -> Answer:
    """Search first, then answer with the first number of the prompt."""
    if messages[-1]["role"] != "tool":
        return calls("search")
    return next(word for word in str(messages[-1]["content"]).split() if word.isdigit())


def guessing(messages: list[Message]) -> Answer:
    return "17"


def chatting(messages: list[Message]) -> Answer:
    return "About 59 or so"


async def test_every_turn_is_captured_and_the_answer_is_rewarded(roll_out: RollOut) -> None:
    episodes = await roll_out(searching, guessing, searching, chatting)
    assert [path_of(episode).reward for episode in episodes] == [1.0, 0.0, 1.0, 0.4]
    assert [episode.is_correct for episode in episodes] == [True, False, True, False]
    first, second = path_of(episodes[0]).steps
    assert [first.finish_reason, second.finish_reason] == ["tool_calls", "stop"]
    assert '"search" {"query": "Amber Bay"}' in decode(first.response_ids)
    assert decode(second.response_ids) == "59"
    system, user, called, found, answer = second.chat_completions
    assert [message["role"] for message in (system, user, called, found)] == ["system", "user", "assistant", "tool"]
    assert found["content"].startswith("The Amber Bay lighthouse has 59 steps")
    assert found["tool_call_id"] == called["tool_calls"][0]["id"]
    assert answer["content"] == "59"


async def test_turns_of_a_rollout_are_one_sequence_with_one_credit(roll_out: RollOut) -> None:
    episodes = await roll_out(searching, guessing, searching, chatting)
    assembled = assemble(episodes, RLOO(), step=0, temperature=1.0)
    assert (len(assembled.batch), assembled.num_forks) == (4, 0)
    # Each reward minus the mean of the other three: 1 - 1.4/3, 0 - 2.4/3, 1 - 1.4/3, 0.4 - 2/3.
    expected = [1.6 / 3, 1.6 / 3, -0.8, 1.6 / 3, 1.6 / 3, -0.8 / 3]
    assert [credit.advantage for credit in assembled.credits] == pytest.approx(expected)


async def test_agent_that_never_answers_is_stopped_without_reward(example: Example, roll_out: RollOut) -> None:
    (episode,) = await roll_out(lambda messages: calls("search"))
    path = path_of(episode)
    assert (len(path.steps), path.reward) == (example("langgraph_rag", "agent").MAX_TURNS, 0.0)


async def test_call_of_an_unknown_tool_returns_an_error_result(roll_out: RollOut) -> None:
    def confused(messages: list[Message]) -> Answer:
        return "59" if messages[-1]["role"] == "tool" else calls("find")

    (episode,) = await roll_out(confused)
    found = path_of(episode).steps[1].chat_completions[-2]["content"]
    assert "find is not a valid tool" in found
    assert path_of(episode).reward == 1.0


async def test_demonstrations_have_the_format_of_the_agent(
    example: Example, roll_out: RollOut, store: MemoryTraceStore
) -> None:
    agent, offline = example("langgraph_rag", "agent"), example("langgraph_rag", "offline")
    (episode,) = await roll_out(searching)
    _, spoken = store.by_session(episode.session_id)
    assert spoken.tools == [convert_to_openai_tool(agent.search)]
    for taught in islice(offline._conversations(0, care=1.0), 10):
        messages = [*spoken.messages, spoken.response]
        assert [message["role"] for message in taught] == [message["role"] for message in messages]
        assert taught[0] == messages[0]
        query = json.loads(taught[2]["tool_calls"][0]["function"]["arguments"])["query"]
        assert query in taught[1]["content"]
        assert f"{taught[4]['content']} {taught[1]['content'].split()[2]}" in taught[3]["content"].splitlines()[0]


def test_every_lighthouse_is_found_by_its_name(example: Example) -> None:
    agent, offline = example("langgraph_rag", "agent"), example("langgraph_rag", "offline")
    assert agent.index.documents == offline.corpus()
    for item in agent.index.documents:
        best, _ = agent.index.forward(item["title"])
        assert best["title"] == item["title"]
    train, held_out = offline.tasks(seed=1)
    assert (len(train), len(held_out)) == (412, 100)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("langgraph_rag", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.4
    assert last["eval/accuracy"] >= 0.8
