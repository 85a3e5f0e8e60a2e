"""A shop assistant on Strands, which asks a tool for prices: `python agent.py openai` (or one of `WAYS`).

Its models take OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the keys from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


@tool
def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    packing = Packing.model_validate(packing)
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


def run(model) -> str:
    agent = Agent(model=model, tools=[price], callback_handler=None)
    return str(agent(QUESTION))


async def stream(model) -> str:
    agent = Agent(model=model, tools=[price], callback_handler=None)
    async for event in agent.stream_async(QUESTION):
        if "result" in event:
            return str(event["result"])
    raise RuntimeError("the agent ended without a result")


def litellm() -> str:
    from strands.models.litellm import LiteLLMModel  # its import takes seconds, which the others do not need

    return run(LiteLLMModel(model_id=f"openai/{MODEL}"))


WAYS = {
    "openai": lambda: run(OpenAIModel(model_id=MODEL)),
    "openai_async": lambda: asyncio.run(stream(OpenAIModel(model_id=MODEL))),
    "responses": lambda: run(OpenAIResponsesModel(model_id=MODEL)),
    "anthropic": lambda: run(AnthropicModel(model_id=MODEL, max_tokens=4096)),
    "litellm": litellm,
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
