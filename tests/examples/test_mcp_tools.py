from __future__ import annotations

import json
import re
import runpy
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rllm.agents.tool_agent import ToolAgent
from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.tools.mcp_tool import MCPTool, mcp_tools
from rllm.trainer import AgentTrainer
from rllm.types import Message, Task, Trajectory

from ..trainer.conftest import ScriptedBackend
from .conftest import EXAMPLES

Example = Callable[[str, str], ModuleType]
Model = Callable[[list[Message]], str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[list[MCPTool]]:
    """The tools of the example's server, which runs once for all tests, as for all rollouts in training."""
    async with mcp_tools(runpy.run_path(str(EXAMPLES / "mcp_tools" / "agent.py"))["SERVER"]) as tools:
        yield tools


def server_processes() -> list[psutil.Process]:
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "server.py" in " ".join(child.cmdline())]


def calls(tool: str, **arguments: int) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def using_tools(messages: list[Message]) -> str:
    """Makes every call that its question needs, and repeats failed ones."""
    question, last = (str(messages[index]["content"]) for index in (1, -1))
    if messages[-1]["role"] != "tool" or last.startswith("Error"):
        return calls("locate", parcel=number_in(question))
    if question.startswith("Which van") or last.startswith("in"):
        return str(number_in(last))
    return calls("arrival", van=number_in(last))


def number_in(text: str) -> int:
    (number,) = re.findall(r"\d+", text)
    return int(number)


async def play(example: Example, tools: Sequence[MCPTool], model: Model, tasks: list[Task]) -> list[Trajectory]:
    """Return the agent's trajectories, made by the parts that the trainer uses."""
    agent = example("mcp_tools", "agent")
    engine = AgentExecutionEngine(
        agent_class=ToolAgent,
        agent_args=agent.agent_args(tools),
        env_class=ToolEnvironment,
        env_args=agent.env_args(tools),
        rollout_engine=ScriptedEngine(model),
    )
    return await engine.execute_tasks(tasks)


async def test_rollouts_share_one_process_and_each_answer_is_rewarded(example: Example, tools: list[MCPTool]) -> None:
    questions, _ = example("mcp_tools", "offline").tasks(seed=0)
    paths = await play(example, tools, using_tools, questions[:20])
    assert len(server_processes()) == 1
    for task, path in zip(questions, paths, strict=False):
        assert len(path.steps) == (2 if task["question"].startswith("Which van") else 3)
        assert decode(path.steps[-1].response_ids) == str(task["answer"])
        assert path.reward == 1.0
    (guess,) = await play(example, tools, lambda messages: "About 7 or 8", questions[:1])
    assert guess.reward == 0.0


async def test_error_of_the_server_is_a_tool_result(example: Example, tools: list[MCPTool]) -> None:
    def model(messages: list[Message]) -> str:
        return calls("locate", parcel=7) if len(messages) == 2 else "0"

    (path,) = await play(example, tools, model, [{"question": "Which van has parcel 7?", "answer": 0}])
    found = str(path.steps[1].chat_completions[-2]["content"])
    assert found.startswith("Error: MCP server 'parcels', tool 'locate' reports: ")
    assert "there is no parcel 7" in found
    assert path.reward == 1.0, "the rollout went on"


class FreezingModel:
    """Uses the tools, and gives every third answer wrongly. It stops the server at once, and kills it when each rollout of
    the first step has asked: their calls are in flight by then."""

    def __init__(self, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        self.num_calls = 0

    def __call__(self, messages: list[Message]) -> str:
        self.num_calls += 1
        if self.num_calls == 1:
            (self.server,) = server_processes()
            self.server.suspend()
        if self.num_calls == self.num_rollouts:
            threading.Timer(0.3, self.server.kill).start()
        content = using_tools(messages)
        return "7" if content.isdigit() and self.num_calls % 3 == 0 else content


class ParcelBackend(ScriptedBackend):
    """Backend without learning, whose model is a `FreezingModel`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inference = ScriptedEngine(FreezingModel(config.tasks_per_step * config.rollout.group_size))


@pytest.mark.examples
async def test_server_that_dies_during_a_batch_is_reported_and_training_continues(
    example: Example, tools: list[MCPTool], tmp_path: Path
) -> None:
    agent, offline = example("mcp_tools", "agent"), example("mcp_tools", "offline")
    (first,) = server_processes()
    trainer = AgentTrainer(
        agent_class=ToolAgent,
        agent_args=agent.agent_args(tools),
        env_class=ToolEnvironment,
        env_args=agent.env_args(tools),
        train_dataset=offline.tasks(seed=0)[0],
        config={
            "run_dir": str(tmp_path / "run"),
            "num_steps": 2,
            "tasks_per_step": 2,
            "backend": f"{__name__}:ParcelBackend",
            "trackers": ["jsonl"],
            "model": {"path": "scripted"},
            "rollout": {"group_size": 4},
        },
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/num_failed" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]
    assert len(ScriptedBackend.latest.batches) == 2
    assert all(0 < len(batch) <= 8 for batch in ScriptedBackend.latest.batches), (
        "the turns of a rollout are one sequence"
    )

    store = open_store(str(tmp_path / "run" / "traces.db"), read_only=True)
    traces = [trace for session in store.sessions() for trace in store.by_session(session.id)]
    store.close()
    found = [str(trace.messages[-1]["content"]) for trace in traces if trace.messages[-1]["role"] == "tool"]
    errors = [text for text in found if text.startswith("Error")]
    assert errors
    for error in errors:
        assert error.startswith("Error: MCP server 'parcels', tool 'locate': ")
        assert "the next call connects to it afresh" in error
    (second,) = server_processes()
    assert second.pid != first.pid


def test_demonstrations_call_the_required_tools(example: Example, tools: list[MCPTool]) -> None:
    offline = example("mcp_tools", "offline")
    for taught in islice(offline._conversations(tools, 0, care=1.0), 20):
        for turn, message in enumerate(taught):
            if message["role"] == "assistant":
                assert message["content"] == using_tools(taught[:turn])


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("mcp_tools", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.6, "the model, which each machine builds for itself, leaves room to learn"
    assert last["eval/accuracy"] >= 0.9
