"""Training data and a model for the clerk, without network: questions, and a tiny model that can use the tools but mostly guesses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent import agent_args
from server import MINUTES, VAN_OF, VANS

from rllm.agents.tool_agent import ToolAgent
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.tools.mcp_tool import MCPTool
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 20,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 40, "timeout_s": 60},
    "optim": {"lr": 3e-4, "schedule": "linear"},
    "eval": {"every": 10},
}
NUM_HELD_OUT = 100
CARE = 0.5
"""Share of turns in which the model's first teacher makes the call that is needed; otherwise it guesses a number."""

LOCATE, ARRIVAL = "Which van has parcel {}?", "When does parcel {} come?"


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """A question about every parcel but the held-out ones, and about those."""
    rng = random.Random(seed)
    parcels = rng.sample(sorted(VAN_OF), len(VAN_OF))
    rows = [_task(parcel, VAN_OF[parcel], rng) for parcel in parcels]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def policy(tools: Sequence[MCPTool]) -> Path:
    """The folder of the tiny model, built on first use."""
    return tiny_policy(
        partial(_conversations, tools, care=1.0),
        partial(_conversations, tools, care=CARE),
        [tool.json for tool in tools],
        recipe=TinyPolicyRecipe(skill_steps=180, habit_steps=50),
    )


def _task(parcel: int, van: int, rng: random.Random) -> Task:
    if rng.random() < 0.5:
        return {"question": LOCATE.format(parcel), "answer": van}
    return {"question": ARRIVAL.format(parcel), "answer": MINUTES[van]}


def _conversations(tools: Sequence[MCPTool], seed: int, *, care: float) -> Iterator[list[Message]]:
    """Endless conversations as the agent records them, about parcels and vans unknown to the server."""
    rng = random.Random(seed)
    agent = ToolAgent(**agent_args(tools))
    while True:
        parcel, van, minutes = rng.randrange(1000, 10000), rng.choice(VANS), rng.randrange(10, 100)
        calls = [("locate", {"parcel": parcel}, f"van {van}"), ("arrival", {"van": van}, f"in {minutes} minutes")]
        asked, answer, needed = rng.choice([(LOCATE, van, calls[:1]), (ARRIVAL, minutes, calls)])
        agent.reset()
        _observe(agent, asked.format(parcel))
        for name, arguments, output in needed:
            if rng.random() >= care:
                answer = rng.randrange(10, 100)
                break
            agent.update_from_model(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
            _observe(agent, {"tool_outputs": {"call": output}})
        agent.update_from_model(str(answer))
        yield agent.chat_completions


def _observe(agent: ToolAgent, observation: Any) -> None:
    agent.update_from_env(observation, None, False, {})
