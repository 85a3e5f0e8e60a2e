"""A shop assistant on the OpenAI SDK, which asks a tool for prices: `python agent.py sync` (or one of `WAYS`).

The client takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


class Price(BaseModel):
    """Return the price of a number of items, packed."""

    item: str
    quantity: float
    packing: Packing


class Total(BaseModel):
    total: float


TOOL = pydantic_function_tool(Price, name="price")
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}


def price(arguments: str) -> str:
    asked = Price.model_validate_json(arguments)
    total = asked.quantity * PRICES[asked.item] + (0.50 if asked.packing.gift else 0)
    return f"{total:.2f} euro for {asked.item} in {asked.packing.paper} paper"


def sync() -> str:
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)})


async def asynchronous() -> str:
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI() as client:
        while True:
            completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
            answer = completion.choices[0].message
            messages.append(answer)
            if not answer.tool_calls:
                return answer.content
            for call in answer.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)})


def deltas() -> str:
    """Build the answer from a stream by hand, as many agents do, which loses the reasoning."""
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        content, calls = "", {}
        for chunk in client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for piece in delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
                call["arguments"] += piece.function.arguments or ""
        if not calls:
            return content
        made = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
        messages.append({"role": "assistant", "content": content, "tool_calls": made})
        for call in calls.values():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": price(call["arguments"])})


def stream() -> str:
    """Use the SDK's own stream helper."""
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as events:
            answer = events.get_final_completion().choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)})


def parse() -> str:
    """Parse the last answer into an object of a class."""
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        completion = client.chat.completions.parse(model=MODEL, messages=messages, tools=[TOOL], response_format=Total)
        answer = completion.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return str(answer.parsed.total)
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)})


def responses() -> str:
    """Use the Responses API, with the whole history in each request."""
    client = OpenAI()
    items = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.responses.create(model=MODEL, input=items, tools=[RESPONSES_TOOL])
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += answer.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": price(call.arguments)})


def previous_response() -> str:
    """Use the Responses API and leave the history to the server: each request has only the new messages."""
    client = OpenAI()
    new, previous = [{"role": "user", "content": QUESTION}], None
    while True:
        answer = client.responses.create(model=MODEL, input=new, tools=[RESPONSES_TOOL], previous_response_id=previous)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        previous = answer.id
        new = [
            {"type": "function_call_output", "call_id": call.call_id, "output": price(call.arguments)} for call in calls
        ]


def responses_stream() -> str:
    client = OpenAI()
    items = [{"role": "user", "content": QUESTION}]
    while True:
        with client.responses.stream(model=MODEL, input=items, tools=[TOOL]) as events:
            answer = events.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += answer.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": price(call.arguments)})


WAYS = {
    "sync": sync,
    "async": lambda: asyncio.run(asynchronous()),
    "deltas": deltas,
    "stream": stream,
    "parse": parse,
    "responses": responses,
    "previous_response": previous_response,
    "responses_stream": responses_stream,
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
