"""Tasks of the demo, and its tiny model, which can solve them but mostly guesses, as it learned from a clerk."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rllm.types import JSONMapping, Message, Task

if TYPE_CHECKING:
    from rllm.testing.tiny_policy import OnProgress, TinyPolicyRecipe

ITEMS = (
    "apple banana bread butter candle carrot cheese cherry coffee egg fig flour garlic ginger grape honey jam juice "
    "kiwi leek lemon lentil lime mango melon milk mint mushroom noodle nut oat olive onion orange papaya pasta peach "
    "pear pepper plum potato radish rice salt soap spinach sugar tea tomato vinegar walnut yogurt"
).split()

QUESTIONS = {
    "price": ['What does "{}" cost?', 'How much is "{}"?', 'Tell me the price of "{}".'],
    "stock": ['How many "{}" are left?', 'Count the "{}" in stock.', 'Is there any "{}" left?'],
}
ASIDES = ["", "", 'I do not need "{}". ', 'Yesterday I took "{}". ']


@dataclass(frozen=True, kw_only=True)
class Clerk:
    """Probabilities that the clerk of the example conversations decides correctly."""

    calls_tool: float = 1.0
    """Probability of calling a tool instead of guessing a number."""
    right_tool: float = 1.0
    right_copy: float = 1.0
    """Probability of copying the tool's result into the answer."""


CAREFUL = Clerk()
SLOPPY = Clerk(calls_tool=0.36, right_tool=0.8, right_copy=0.97)
"""Correct in 0.36 x 0.9 x 0.97, about a third of its answers: mostly it guesses, which rarely succeeds."""


def shop_tasks(count: int, *, seed: int) -> list[Task]:
    """Return questions with the shelves that answer them. Numbers are new in every task, so they cannot be learned."""
    rng = random.Random(seed)
    return [_shop_task(rng) for _ in range(count)]


def _shop_task(rng: random.Random) -> Task:
    items = rng.sample(ITEMS, 4)
    prices, stock = ({item: rng.randint(10, 99) for item in items} for _ in range(2))
    tool = rng.choice(list(QUESTIONS))
    question = rng.choice(ASIDES).format(items[1]) + rng.choice(QUESTIONS[tool]).format(items[0])
    answer = (prices if tool == "price" else stock)[items[0]]
    return {"question": question, "answer": answer, "prices": prices, "stock": stock}


def sum_tasks(count: int, *, seed: int) -> list[Task]:
    """Return sums and differences of two or three numbers of one or two digits: reasoning-gym's `chain_sum`."""
    rng = random.Random(seed)
    return [_sum_task(rng) for _ in range(count)]


def _sum_task(rng: random.Random) -> Task:
    low, high = rng.choice([(0, 9), (10, 99)])
    answer = rng.randint(low, high)
    problem = str(answer)
    for _ in range(rng.randint(1, 2)):
        sign, term = rng.choice([1, -1]), rng.randint(low, high)
        answer += sign * term
        problem += f" {'+' if sign > 0 else '-'} {term}"
    return {"question": f"State the final answer to the following arithmetic problem: {problem} =", "answer": answer}


def conversations(clerk: Clerk, *, system: str, seed: int) -> Iterator[list[Message]]:
    """Yield endless conversations of a clerk, each ending with an answer."""
    rng = random.Random(seed)
    while True:
        yield _conversation(_shop_task(rng), clerk, system, rng)


def _conversation(task: Task, clerk: Clerk, system: str, rng: random.Random) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": task["question"]}]
    if rng.random() >= clerk.calls_tool:
        return [*messages, {"role": "assistant", "content": f"About {rng.randint(10, 99)}"}]
    item = next(iter(task["prices"]))
    tool = "price" if any(text.format(item) in task["question"] for text in QUESTIONS["price"]) else "stock"
    if rng.random() >= clerk.right_tool:
        tool = rng.choice(list(QUESTIONS))
    number = (task["prices"] if tool == "price" else task["stock"])[item]
    answer = number if rng.random() < clerk.right_copy else rng.randint(10, 99)
    function = {"name": tool, "arguments": json.dumps({"item": item})}
    return [
        *messages,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call", "content": str(number)},
        {"role": "assistant", "content": str(answer)},
    ]


def demo_policy(
    system: str,
    tools: Sequence[JSONMapping],
    on_progress: OnProgress | None = None,
    *,
    recipe: TinyPolicyRecipe | None = None,
) -> Path:
    """Return the folder of the demo's model, which is built on first use; the recipe sets its size."""
    from rllm.testing.tiny_policy import tiny_policy

    def speech(clerk: Clerk, seed: int) -> Iterator[list[Message]]:
        return conversations(clerk, system=system, seed=seed)

    return tiny_policy(partial(speech, CAREFUL), partial(speech, SLOPPY), tools, recipe=recipe, on_progress=on_progress)
