"""A shop assistant on AutoGen, which asks a tool for prices: `python agent.py assistant` (or one of `WAYS`).

Its client takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


async def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


# A model unknown to AutoGen has to be described.
client = OpenAIChatCompletionClient(
    model=MODEL,
    model_info=ModelInfo(
        vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
    ),
)


def agent(name: str, system_message: str, stream: bool = False) -> AssistantAgent:
    return AssistantAgent(
        name,
        client,
        tools=[price],
        system_message=system_message,
        max_tool_iterations=5,
        model_client_stream=stream,
    )


def assistant(stream: bool = False) -> AssistantAgent:
    return agent("assistant", "You help the customers of a pastry shop.", stream)


async def run(agent: AssistantAgent) -> str:
    return (await agent.run(task=QUESTION)).messages[-1].content


async def stream(agent: AssistantAgent) -> str:
    async for event in agent.run_stream(task=QUESTION):
        print(event, file=sys.stderr)
    return event.messages[-1].content


async def team() -> str:
    """Run the assistant with a colleague who looks up the same prices and approves the answer."""
    colleague = agent("colleague", "You check sums. Say APPROVED if they are right.")
    approved = TextMentionTermination("APPROVED", sources=["colleague"])
    talk = RoundRobinGroupChat([assistant(), colleague], termination_condition=approved, max_turns=6)
    return (await talk.run(task=QUESTION)).messages[-1].content


WAYS = {
    "assistant": lambda: run(assistant()),
    "assistant_stream": lambda: stream(assistant(stream=True)),
    "team": team,
}

if __name__ == "__main__":
    print(asyncio.run(WAYS[sys.argv[1]]()))
