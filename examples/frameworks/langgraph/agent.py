"""A shop assistant on LangChain and LangGraph, which asks a tool for prices: `python agent.py create_agent` (or one of `WAYS`).

Its models take OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the keys from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
SYSTEM = "You help the customers of a pastry shop."
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


@tool
def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


def agent(model):
    """Return LangChain's own loop of a model and its tools."""
    return create_agent(model, [price], system_prompt=SYSTEM)


def graph(model):
    """Return the same loop, built by hand."""
    model_with_tools = model.bind_tools([price])

    def think(state: MessagesState) -> dict:
        return {"messages": [model_with_tools.invoke([("system", SYSTEM), *state["messages"]])]}

    return (
        StateGraph(MessagesState)
        .add_node("think", think)
        .add_node("tools", ToolNode([price]))
        .add_edge(START, "think")
        .add_conditional_edges("think", tools_condition)
        .add_edge("tools", "think")
        .compile()
    )


def run(runnable) -> str:
    return runnable.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text


async def run_async(runnable) -> str:
    return (await runnable.ainvoke({"messages": [("user", QUESTION)]}))["messages"][-1].text


def stream(runnable) -> str:
    """Read every token as it arrives; the last message is the answer."""
    texts: dict[str, str] = {}
    for message, _ in runnable.stream({"messages": [("user", QUESTION)]}, stream_mode="messages"):
        if isinstance(message, AIMessage):
            texts[message.id] = texts.get(message.id, "") + message.text
    return list(texts.values())[-1]


def injected() -> ChatOpenAI:
    """Return a model with custom clients."""
    return ChatOpenAI(
        model=MODEL, client=OpenAI().chat.completions, async_client=AsyncOpenAI().chat.completions, api_key="unused"
    )


WAYS = {
    "create_agent": lambda: run(agent(ChatOpenAI(model=MODEL))),
    "create_agent_async": lambda: asyncio.run(run_async(agent(ChatOpenAI(model=MODEL)))),
    "create_agent_stream": lambda: stream(agent(ChatOpenAI(model=MODEL))),
    "graph": lambda: run(graph(ChatOpenAI(model=MODEL))),
    "graph_stream": lambda: stream(graph(ChatOpenAI(model=MODEL))),
    "injected": lambda: run(agent(injected())),
    "responses": lambda: run(agent(ChatOpenAI(model=MODEL, use_responses_api=True))),
    "responses_stream": lambda: stream(agent(ChatOpenAI(model=MODEL, use_responses_api=True))),
    "anthropic": lambda: run(agent(ChatAnthropic(model=MODEL))),
    "anthropic_stream": lambda: stream(agent(ChatAnthropic(model=MODEL))),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
