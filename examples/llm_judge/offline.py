"""Tasks, a model and a judge, without network: a tiny model that rarely greets well, and a scripted judge.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rllm.testing import ScriptedEngine, ScriptedServer
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Lou")
TIMES = ("morning", "afternoon", "evening")
SETTINGS = {
    "num_steps": 20,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 24, "timeout_s": 60},
    "algorithm": {"name": "gdpo"},
    "optim": {"lr": 5e-4, "schedule": "linear"},
    "eval": {"every": 10, "num_rollouts": 4},
}
NUM_HELD_OUT = 12
GREETS_WELL = 0.2
"""Share of guests that are greeted well in the habit phase."""


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return the guests to train on, and the held-out ones."""
    guests = [{"guest": f"{name}, {time}"} for name, time in product(NAMES, TIMES)]
    random.Random(seed).shuffle(guests)
    return guests[NUM_HELD_OUT:], guests[:NUM_HELD_OUT]


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, greets_well=1.0),
        partial(_conversations, greets_well=GREETS_WELL),
        recipe=TinyPolicyRecipe(skill_steps=120, habit_steps=30, batch_size=64),
    )


def _conversations(seed: int, *, greets_well: float) -> Iterator[list[Message]]:
    rng = random.Random(seed)
    while True:
        name, time = rng.choice(NAMES), rng.choice(TIMES)
        reply = f"Good {time}, {name}."
        if rng.random() >= greets_well:
            addressed = rng.choice(["", f", {name}", f", {rng.choice(NAMES)}"])
            reply = f"Good {rng.choice(TIMES)}{addressed}.{rng.choice(['', ' Next!'])}"
        yield [{"role": "user", "content": f"{name}, {time}"}, {"role": "assistant", "content": reply}]


def judge_server() -> ScriptedServer:
    """Return a server that takes the place of a judge and scores by rules; start it with `with`."""
    return ScriptedServer(ScriptedEngine(_verdict), model="judge")


def _verdict(messages: list[dict[str, Any]]) -> str:
    shown = json.loads(messages[1]["content"])
    (name, time), reply = shown["task"]["guest"].split(", "), shown["answer"]
    scores = {
        "by_name": int(f", {name}" in reply),
        "time_of_day": int(f"Good {time}" in reply),
        "brief": int(reply.strip().endswith(".")),
    }
    return json.dumps({"reasoning": f"Compared with 'Good {time}, {name}.'", "scores": scores})


if __name__ == "__main__":
    print(policy())
