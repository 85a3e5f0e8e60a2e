"""A shop assistant on LiteLLM, which asks a tool for prices: `python agent.py openai` (or one of `WAYS`).

LiteLLM takes OPENAI_BASE_URL, HOSTED_VLLM_API_BASE, ANTHROPIC_BASE_URL and the keys from the environment; nothing here depends
on rllm.
"""

import asyncio
import json
import os
import sys

import litellm

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}
PACKING = {
    "type": "object",
    "properties": {"paper": {"type": "string"}, "gift": {"type": "boolean"}},
    "required": ["paper", "gift"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Return the price of a number of items, packed.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "quantity": {"type": "number"}, "packing": PACKING},
            "required": ["item", "quantity", "packing"],
        },
    },
}


def price(item: str, quantity: float, packing: dict) -> str:
    total = quantity * PRICES[item] + (0.50 if packing["gift"] else 0)
    return f"{total:.2f} euro for {item} in {packing['paper']} paper"


def results_of(answer) -> list[dict]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": price(**json.loads(call.function.arguments))}
        for call in answer.tool_calls
    ]


def complete(model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.completion(model=model, messages=messages, tools=[TOOL]).choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages += [answer, *results_of(answer)]


async def asynchronous(model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        completion = await litellm.acompletion(model=model, messages=messages, tools=[TOOL])
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages += [answer, *results_of(answer)]


def stream(model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        chunks = list(litellm.completion(model=model, messages=messages, tools=[TOOL], stream=True))
        answer = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages += [answer, *results_of(answer)]


WAYS = {
    "openai": lambda: complete(f"openai/{MODEL}"),
    "openai_async": lambda: asyncio.run(asynchronous(f"openai/{MODEL}")),
    "openai_stream": lambda: stream(f"openai/{MODEL}"),
    "hosted_vllm": lambda: complete(f"hosted_vllm/{MODEL}"),
    "anthropic": lambda: complete(f"anthropic/{MODEL}"),
    "anthropic_stream": lambda: stream(f"anthropic/{MODEL}"),
    "responses": lambda: complete(f"openai/responses/{MODEL}"),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
