"""A shop assistant on pydantic-ai, which asks a tool for prices: `python agent.py chat` (or one of `WAYS`).

Its models take OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the keys from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}

agent = Agent(system_prompt="You help the customers of a pastry shop.")


class Packing(BaseModel):
    paper: str
    gift: bool


@agent.tool_plain
def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


def run(model: str) -> str:
    return agent.run_sync(QUESTION, model=model).output


async def stream(model: str) -> str:
    async def show(context, events) -> None:
        async for event in events:
            print(event, file=sys.stderr)

    return (await agent.run(QUESTION, model=model, event_stream_handler=show)).output


WAYS = {
    "chat": lambda: run(f"openai-chat:{MODEL}"),
    "chat_stream": lambda: asyncio.run(stream(f"openai-chat:{MODEL}")),
    "responses": lambda: run(f"openai-responses:{MODEL}"),
    "responses_stream": lambda: asyncio.run(stream(f"openai-responses:{MODEL}")),
    "anthropic": lambda: run(f"anthropic:{MODEL}"),
    "anthropic_stream": lambda: asyncio.run(stream(f"anthropic:{MODEL}")),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
