"""A shop assistant on the OpenAI Agents SDK, which asks a tool for prices: `python agent.py chat` (or one of `WAYS`).

Its models take OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


@function_tool
def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


agent = Agent(name="Assistant", instructions="You help the customers of a pastry shop.", tools=[price], model=MODEL)
CHAT = RunConfig(model_provider=OpenAIProvider(use_responses=False))
RESPONSES = RunConfig(model_provider=OpenAIProvider(use_responses=True))


async def run(config: RunConfig, **options) -> str:
    return (await Runner.run(agent, QUESTION, run_config=config, **options)).final_output


async def stream(config: RunConfig) -> str:
    result = Runner.run_streamed(agent, QUESTION, run_config=config)
    async for event in result.stream_events():
        print(event.type, file=sys.stderr)
    return result.final_output


WAYS = {
    "chat": lambda: run(CHAT),
    "chat_stream": lambda: stream(CHAT),
    "responses": lambda: run(RESPONSES),
    "responses_stream": lambda: stream(RESPONSES),
    "previous_response": lambda: run(RESPONSES, auto_previous_response_id=True),
}

if __name__ == "__main__":
    print(asyncio.run(WAYS[sys.argv[1]]()))
