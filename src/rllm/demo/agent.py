"""A shop assistant in plain `openai`, without any rllm code; OPENAI_BASE_URL is the address of its model."""

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
            return float(re.findall(r"\d+", message.content or "")[-1:] == [str(answer)])
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
