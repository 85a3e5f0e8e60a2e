"""A shop assistant on DSPy, which asks a tool for prices: `python agent.py react` (or one of `WAYS`).

LiteLLM takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

import dspy
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", cache=False))  # a cache would return the answers of an earlier policy


class Packing(BaseModel):
    paper: str
    gift: bool


def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


def react() -> str:
    return dspy.ReAct("question -> answer", tools=[price])(question=QUESTION).answer


async def react_async() -> str:
    return (await dspy.ReAct("question -> answer", tools=[price]).acall(question=QUESTION)).answer


async def stream() -> str:
    """Stream every call; the last item is the answer."""
    agent = dspy.streamify(dspy.ReAct("question -> answer", tools=[price]))
    *_, done = [chunk async for chunk in agent(question=QUESTION)]
    return done.answer


def parallel() -> str:
    """Ask in DSPy's own threads."""
    agent = dspy.ReAct("question -> answer", tools=[price])
    (done,) = dspy.Parallel(num_threads=2)([(agent, {"question": QUESTION})])
    return done.answer


WAYS = {
    "react": react,
    "async": lambda: asyncio.run(react_async()),
    "stream": lambda: asyncio.run(stream()),
    "parallel": parallel,
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
