"""A shop assistant on smolagents, which asks a tool for prices: `python agent.py tools` (or one of `WAYS`).

Its models take OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import os
import sys

from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, ToolCallingAgent, tool

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


@tool
def price(item: str, quantity: float, packing: dict) -> str:
    """Return the price of a number of items, packed.

    Args:
        item: What is bought.
        quantity: How many of them.
        packing: The kind of paper, as "paper", and whether it is a "gift".
    """
    total = quantity * PRICES[item] + (0.50 if packing["gift"] else 0)
    return f"{total:.2f} euro for {item} in {packing['paper']} paper"


def tools(model, stream: bool = False) -> str:
    return ToolCallingAgent(tools=[price], model=model, stream_outputs=stream).run(QUESTION)


def code(model, stream: bool = False) -> str:
    return CodeAgent(tools=[price], model=model, stream_outputs=stream).run(QUESTION)


WAYS = {
    "tools": lambda: tools(OpenAIModel(MODEL)),
    "tools_stream": lambda: tools(OpenAIModel(MODEL), stream=True),
    "tools_litellm": lambda: tools(LiteLLMModel(f"openai/{MODEL}")),
    "code": lambda: code(OpenAIModel(MODEL)),
    "code_stream": lambda: code(OpenAIModel(MODEL), stream=True),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
