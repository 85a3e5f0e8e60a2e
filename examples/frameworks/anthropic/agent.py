"""A shop assistant on the Anthropic SDK, which asks a tool for prices: `python agent.py create` (or one of `WAYS`).

The client takes ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from typing_extensions import TypedDict

MODEL = os.environ.get("ANTHROPIC_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(TypedDict):
    paper: str
    gift: bool


def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    total = quantity * PRICES[item] + (0.50 if packing["gift"] else 0)
    return f"{total:.2f} euro for {item} in {packing['paper']} paper"


PACKING = {
    "type": "object",
    "properties": {"paper": {"type": "string"}, "gift": {"type": "boolean"}},
    "required": ["paper", "gift"],
}
TOOL = {
    "name": "price",
    "description": price.__doc__,
    "input_schema": {
        "type": "object",
        "properties": {"item": {"type": "string"}, "quantity": {"type": "number"}, "packing": PACKING},
        "required": ["item", "quantity", "packing"],
    },
}


def results_of(answer) -> list[dict]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": price(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]


def text_of(answer) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def create() -> str:
    client = Anthropic()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.messages.create(model=MODEL, max_tokens=4096, messages=messages, tools=[TOOL])
        if answer.stop_reason != "tool_use":
            return text_of(answer)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results_of(answer)}]


async def asynchronous() -> str:
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncAnthropic() as client:
        while True:
            answer = await client.messages.create(model=MODEL, max_tokens=4096, messages=messages, tools=[TOOL])
            if answer.stop_reason != "tool_use":
                return text_of(answer)
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": results_of(answer)})


def stream() -> str:
    client = Anthropic()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        with client.messages.stream(model=MODEL, max_tokens=4096, messages=messages, tools=[TOOL]) as events:
            answer = events.get_final_message()
        if answer.stop_reason != "tool_use":
            return text_of(answer)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results_of(answer)}]


def tool_runner() -> str:
    """Run the SDK's own loop, which first tries to leave the conversation to the server."""
    runner = Anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=4096, messages=[{"role": "user", "content": QUESTION}], tools=[beta_tool(price)]
    )
    return text_of(runner.until_done())


def tool_runner_stream() -> str:
    runner = Anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=4096,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[beta_tool(price)],
        stream=True,
    )
    for events in runner:
        answer = events.get_final_message()
    return text_of(answer)


WAYS = {
    "create": create,
    "async": lambda: asyncio.run(asynchronous()),
    "stream": stream,
    "tool_runner": tool_runner,
    "tool_runner_stream": tool_runner_stream,
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
