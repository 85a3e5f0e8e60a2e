from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments import NamedEnvironment, open_env
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.tracking.about import evaluations_of
from rllm.trainer import AgentTrainer
from rllm.types import Message, Task, Trajectory

from ..trainer.conftest import ScriptedBackend
from .conftest import EXAMPLES

Example = Callable[[str, str], ModuleType]
Model = Callable[[list[Message]], str]
README = EXAMPLES / "mcp_tools" / "README.md"


@pytest.fixture
def parcels(example: Example, tmp_path: Path) -> Iterator[NamedEnvironment]:
    """The environment of the example, with the first twenty questions."""
    offline = example("mcp_tools", "offline")
    file = tmp_path / offline.TRAIN
    file.write_text("".join(json.dumps(row) + "\n" for row in offline.tasks()[0][:20]))
    named = open_env(f"mcp:{offline.SERVER}?tasks={file}&max_steps=4")
    yield named
    named.env_args["tools"][0]._connection.close()


def server_processes() -> list[psutil.Process]:
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "server.py" in " ".join(child.cmdline())]


def calls(tool: str, **arguments: int) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def using_tools(messages: list[Message]) -> str:
    """Make every call that the question needs, and repeat failed ones."""
    question, last = (str(messages[index]["content"]) for index in (1, -1))
    if messages[-1]["role"] != "tool" or last.startswith("Error"):
        return calls("locate", parcel=number_in(question))
    if question.startswith("Which van") or last.startswith("in"):
        return str(number_in(last))
    return calls("arrival", van=number_in(last))


def number_in(text: str) -> int:
    (number,) = re.findall(r"\d+", text)
    return int(number)


async def play(named: NamedEnvironment, model: Model, tasks: list[Task]) -> list[Trajectory]:
    """Return the agent's trajectories, made by the parts that the trainer uses."""
    assert named.env_class is not None
    engine = AgentExecutionEngine(
        agent_class=named.agent_class,
        agent_args=named.agent_args,
        env_class=named.env_class,
        env_args=named.env_args,
        rollout_engine=ScriptedEngine(model),
        max_steps=named.max_steps,
    )
    return await engine.execute_tasks(tasks)


@pytest.mark.slow
async def test_rollouts_share_one_process_and_each_answer_is_rewarded(parcels: NamedEnvironment) -> None:
    tasks = list(parcels.tasks)
    paths = await play(parcels, using_tools, tasks)
    assert len(server_processes()) == 1
    for task, path in zip(tasks, paths, strict=True):
        assert len(path.steps) == (2 if task["question"].startswith("Which van") else 3)
        assert decode(path.steps[-1].response_ids) == str(task["answer"])
        assert path.reward == 1.0
    (guess,) = await play(parcels, lambda messages: "7", tasks[:1])
    assert guess.reward == 0.0


class FreezingModel:
    """Model that uses the tools, and answers wrongly every third time.

    It suspends the server at once, and kills it after the first answer to each rollout of the first step: by then their
    calls are in flight.
    """

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
    parcels: NamedEnvironment, tmp_path: Path
) -> None:
    (first,) = server_processes()
    trainer = AgentTrainer(
        env=parcels,
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
        assert error.startswith("Error: MCP server ")
        assert "tool 'locate': " in error
        assert "the next call connects again" in error
    (second,) = server_processes()
    assert second.pid != first.pid


@pytest.mark.slow
def test_demonstrations_call_the_required_tools(example: Example, parcels: NamedEnvironment) -> None:
    offline = example("mcp_tools", "offline")
    for taught in islice(offline._conversations(parcels.agent_args, 0, care=1.0), 20):
        for turn, message in enumerate(taught):
            if message["role"] == "assistant":
                assert message["content"] == using_tools(taught[:turn])


@pytest.mark.examples
def test_commands_of_the_readme_reach_its_accuracy(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    run = tmp_path / "run"
    script = f"{commands.replace('examples/', f'{EXAMPLES}/').rstrip()} run_dir={run}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = [metrics["eval/accuracy"] for metrics in evaluations_of(run)]
    assert first <= 0.5, "the untrained model leaves room to learn"
    assert last >= 0.75
