"""Training data and a model for the agent, without network: a corpus of lighthouses, and a tiny model that mostly guesses.

`python offline.py` writes the corpus, builds the model, and prints its folder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from agent import CORPUS, SYSTEM, search
from langchain_core.utils.function_calling import convert_to_openai_tool

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 20,
    "tasks_per_step": 8,
    "rollout": {"group_size": 8, "max_tokens": 40, "timeout_s": 60},
    "algorithm": {"name": "rloo", "aggregation": "seq-mean-token-sum"},
    "optim": {"lr": 3e-4, "schedule": "linear"},
    "eval": {"every": 10},
}
NUM_HELD_OUT = 100
CARE = 0.5
"""Share of turns of the habit phase that search and then read; the others guess."""

FIRST = "Amber Birch Cedar Coral Ebony Grey Holly Ivory Maple Olive Pearl Ruby Silver Stone Violet Willow".split()
SECOND = "Bay Beach Cape Cliff Cove Creek Head Isle Ness Point Reef Rock Shoal Sound Spit Strand".split()
PARTS = ("steps", "windows")


def corpus() -> list[dict[str, int | str]]:
    """Return a document for each lighthouse."""
    rng = random.Random(0)
    return [lighthouse(f"{first} {second}", rng) for first, second in product(FIRST, SECOND)]


def lighthouse(name: str, rng: random.Random) -> dict[str, int | str]:
    """Return a document: its text, and the numbers in it."""
    steps, windows = rng.sample(range(10, 100), 2)
    text = f"The {name} lighthouse has {steps} steps and {windows} windows."
    return {"title": name, "text": text, "steps": steps, "windows": windows}


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return the questions to train on, and the held-out ones, about other lighthouses of the corpus."""
    documents = [json.loads(line) for line in CORPUS.read_text().split("\n") if line]
    random.Random(seed).shuffle(documents)
    rows = [
        {"question": question(item["title"], part), "ground_truth": str(item[part])}
        for item in documents
        for part in PARTS
    ]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def question(name: str, part: str) -> str:
    return f"How many {part} has {name}?"


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, care=1.0),
        partial(_conversations, care=CARE),
        [convert_to_openai_tool(search)],
        recipe=TinyPolicyRecipe(skill_steps=150, habit_steps=30),
    )


def _conversations(seed: int, *, care: float) -> Iterator[list[Message]]:
    """Yield conversations without end about lighthouses that are not in the corpus."""
    rng = random.Random(seed)
    while True:
        names = [f"{rng.choice(FIRST)} {rng.choice(SECOND)}" for _ in range(2)]
        found = [lighthouse(name, rng) for name in names]
        part = rng.choice(PARTS)
        asked: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question(names[0], part)},
        ]
        if rng.random() >= care:
            yield [*asked, {"role": "assistant", "content": str(rng.randint(10, 99))}]
            continue
        seen = [item[each] for item in found for each in PARTS]
        answer = found[0][part] if rng.random() < care else rng.choice(seen)
        function = {"name": search.name, "arguments": json.dumps({"query": names[0]})}
        call = {"id": "call", "type": "function", "function": function}
        yield [
            *asked,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call", "content": "\n".join(str(item["text"]) for item in found)},
            {"role": "assistant", "content": str(answer)},
        ]


if __name__ == "__main__":
    CORPUS.write_text("".join(json.dumps(item) + "\n" for item in corpus()))
    print(policy())
