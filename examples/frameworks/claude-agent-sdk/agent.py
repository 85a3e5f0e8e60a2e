"""A shop assistant on the Claude Agent SDK, whose tool runs in this process: `python agent.py query` (or one of `WAYS`).

The SDK starts Claude Code, which takes ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY from the environment; nothing here
depends on rllm.
"""

import asyncio
import os
import sys
from dataclasses import replace

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    StreamEvent,
    create_sdk_mcp_server,
    query,
    tool,
)

MODEL = os.environ.get("ANTHROPIC_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string"},
        "quantity": {"type": "number"},
        "packing": {
            "type": "object",
            "properties": {"paper": {"type": "string"}, "gift": {"type": "boolean"}},
            "required": ["paper", "gift"],
        },
    },
    "required": ["item", "quantity", "packing"],
}


@tool("price", "Return the price of a number of items, packed.", SCHEMA)
async def price(asked):
    packing = asked["packing"]
    total = asked["quantity"] * PRICES[asked["item"]] + (0.50 if packing["gift"] else 0)
    return {"content": [{"type": "text", "text": f"{total:.2f} euro for {asked['item']} in {packing['paper']} paper"}]}


OPTIONS = ClaudeAgentOptions(
    model=MODEL,
    system_prompt="You sell sweets.",
    tools=[],  # without Claude Code's own
    mcp_servers={"shop": create_sdk_mcp_server("shop", tools=[price])},
    allowed_tools=["mcp__shop__price"],
    setting_sources=[],
)


async def whole(options: ClaudeAgentOptions = OPTIONS) -> str:
    """Run the SDK's `query`, which ends with a result."""
    answer = ""
    async for message in query(prompt=QUESTION, options=options):
        if isinstance(message, ResultMessage):
            answer = message.result
    return answer


async def client() -> str:
    """Use the client for conversations."""
    async with ClaudeSDKClient(OPTIONS) as assistant:
        await assistant.query(QUESTION)
        async for message in assistant.receive_response():
            if isinstance(message, ResultMessage):
                answer = message.result
    return answer


async def partial() -> str:
    """Build the answer from the events of its stream."""
    text = ""
    async for message in query(prompt=QUESTION, options=replace(OPTIONS, include_partial_messages=True)):
        if isinstance(message, StreamEvent) and message.event["type"] == "message_start":
            text = ""
        elif isinstance(message, StreamEvent) and message.event["type"] == "content_block_delta":
            text += message.event["delta"].get("text", "")
    return text


def claude_code() -> ClaudeAgentOptions:
    """Use Claude Code's own prompt, and some of its tools alongside ours."""
    preset = {"type": "preset", "preset": "claude_code"}
    return replace(OPTIONS, system_prompt=preset, tools=["Read", "Write"])


WAYS = {
    "query": whole,
    "client": client,
    "partial": partial,
    "titled": whole,
    "claude_code": lambda: whole(claude_code()),
}

if __name__ == "__main__":
    print(asyncio.run(WAYS[sys.argv[1]]()))
