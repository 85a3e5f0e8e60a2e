"""Agents in plain `openai`, without any rllm code; OPENAI_BASE_URL is the address of their model."""

import json
import re

from openai import OpenAI

client = OpenAI()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
    for name, description in [("price", "what an item costs"), ("stock", "how many are left")]
]
SYSTEM = "Answer with a number."


def shop_assistant(question: str, answer: int, prices: dict[str, int], stock: dict[str, int]) -> float:
    """Answer a customer's question; the reward is 1.0 for the right number and 0.0 otherwise."""
    shelves = {"price": prices, "stock": stock}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(4):
        response = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=48)
        message = response.choices[0].message
        if not message.tool_calls:
            return ends_with(message.content, answer)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = look_up(shelves, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def look_up(shelves: dict[str, dict[str, int]], tool: str, arguments: str) -> str:
    """Run one tool call; a mistake of the model is returned to it as text."""
    try:
        return str(shelves[tool][json.loads(arguments)["item"]])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def add_up(question: str, answer: int) -> float:
    """Answer a sum; the reward is 1.0 for the right number and 0.0 otherwise."""
    messages = [{"role": "user", "content": question}]
    response = client.chat.completions.create(model="policy", messages=messages, max_tokens=48)
    return ends_with(response.choices[0].message.content, answer)


def ends_with(text: str | None, answer: int) -> float:
    """Return 1.0 if the last number of a text is the answer, else 0.0."""
    return float(re.findall(r"-?\d+", text or "")[-1:] == [str(answer)])
