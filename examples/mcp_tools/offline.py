"""Questions and a model without network: the model can use the server's tools, but mostly guesses.

`python offline.py` writes parcels.jsonl and held_out.jsonl here, and prints the folder of the model.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from server import MINUTES, VAN_OF, VANS

from rllm.agents.tool_agent import ToolAgent
from rllm.environments import open_env
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import JSONMapping, Message, Task

SERVER = shlex.join([sys.executable, str(Path(__file__).with_name("server.py"))])
TRAIN, HELD_OUT = "parcels.jsonl", "held_out.jsonl"
NUM_HELD_OUT = 100
CARE = 0.5
"""Share of turns of the habit phase that make the call that is needed; the others guess a number."""

LOCATE, ARRIVAL = "Which van has parcel {}?", "When does parcel {} come?"


def tasks() -> tuple[list[Task], list[Task]]:
    """Return the questions to train on, and the held-out ones; each is about a different parcel."""
    rng = random.Random(0)
    parcels = rng.sample(sorted(VAN_OF), len(VAN_OF))
    rows = [_task(parcel, VAN_OF[parcel], rng) for parcel in parcels]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def policy(agent_args: JSONMapping) -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, agent_args, care=1.0),
        partial(_conversations, agent_args, care=CARE),
        recipe=TinyPolicyRecipe(skill_steps=180, habit_steps=50),
    )


def _task(parcel: int, van: int, rng: random.Random) -> Task:
    if rng.random() < 0.5:
        return {"question": LOCATE.format(parcel), "answer": van}
    return {"question": ARRIVAL.format(parcel), "answer": MINUTES[van]}


def _conversations(agent_args: JSONMapping, seed: int, *, care: float) -> Iterator[list[Message]]:
    """Yield endless conversations as the agent records them, about parcels and vans unknown to the server."""
    rng = random.Random(seed)
    agent = ToolAgent(**agent_args)
    while True:
        parcel, van, minutes = rng.randrange(1000, 10000), rng.choice(VANS), rng.randrange(10, 100)
        calls = [("locate", {"parcel": parcel}, f"van {van}"), ("arrival", {"van": van}, f"in {minutes} minutes")]
        asked, answer, needed = rng.choice([(LOCATE, van, calls[:1]), (ARRIVAL, minutes, calls)])
        agent.reset()
        _observe(agent, {"question": asked.format(parcel)})
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


if __name__ == "__main__":
    for file, rows in zip((TRAIN, HELD_OUT), tasks(), strict=True):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(policy(open_env(f"mcp:{SERVER}?tasks={TRAIN}").agent_args))
