"""A shop assistant on LlamaIndex, which asks a tool for prices: `python agent.py function` (or one of `WAYS`).

The client takes OPENAI_API_BASE and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    packing = Packing.model_validate(packing)
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


TOOL = FunctionTool.from_defaults(price)


def policy() -> OpenAILike:
    """Return the model, which may have any name."""
    return OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, context_window=32_768)


async def run(agent: FunctionAgent | ReActAgent) -> str:
    return str(await agent.run(QUESTION))


def function(*, streaming: bool) -> str:
    return asyncio.run(run(FunctionAgent(tools=[TOOL], llm=policy(), streaming=streaming)))


def react(*, streaming: bool) -> str:
    """Run an agent that calls tools by text."""
    return asyncio.run(run(ReActAgent(tools=[TOOL], llm=policy(), streaming=streaming)))


def openai() -> str:
    """Run with LlamaIndex's own client, which only accepts model names that it knows."""
    return asyncio.run(run(FunctionAgent(tools=[TOOL], llm=OpenAI(model="gpt-4o-mini"), streaming=False)))


WAYS = {
    "function": lambda: function(streaming=False),
    "function_stream": lambda: function(streaming=True),
    "openai": openai,
    "react": lambda: react(streaming=False),
    "react_stream": lambda: react(streaming=True),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
