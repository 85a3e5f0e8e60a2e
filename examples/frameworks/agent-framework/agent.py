"""A shop assistant on Microsoft Agent Framework, which asks a tool for prices: `python agent.py chat` (or one of `WAYS`).

Its clients take OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    packed = Packing.model_validate(packing)  # it comes as a dict
    total = quantity * PRICES[item] + (0.50 if packed.gift else 0)
    return f"{total:.2f} euro for {item} in {packed.paper} paper"


def agent(client) -> Agent:
    return Agent(client, instructions="You help the customers of a pastry shop.", tools=[price])


async def run(client) -> str:
    return (await agent(client).run(QUESTION)).text


async def stream(client) -> str:
    response = agent(client).run(QUESTION, stream=True)
    async for update in response:
        print(update.text, end="", file=sys.stderr)
    return (await response.get_final_response()).text


async def two_runs(client) -> str:
    """Run twice in one session, which keeps the conversation; with the Responses client, the server does."""
    shopkeeper = agent(client)
    session = shopkeeper.create_session()
    await shopkeeper.run(QUESTION, session=session)
    return (await shopkeeper.run("Say it again, please.", session=session)).text


WAYS = {
    "chat": lambda: run(OpenAIChatCompletionClient(model=MODEL)),
    "chat_stream": lambda: stream(OpenAIChatCompletionClient(model=MODEL)),
    "responses": lambda: run(OpenAIChatClient(model=MODEL)),
    "responses_stream": lambda: stream(OpenAIChatClient(model=MODEL)),
    "responses_session": lambda: two_runs(OpenAIChatClient(model=MODEL)),
}

if __name__ == "__main__":
    print(asyncio.run(WAYS[sys.argv[1]]()))
