"""A shop assistant on the Claude Agent SDK: Claude Code asks the model, and calls tools that run in this process."""

import logging
import re
from tempfile import gettempdir
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultError, ResultMessage, create_sdk_mcp_server, query, tool

from rllm.sdk import environment

logger = logging.getLogger(__name__)

SYSTEM = "Answer with a number."
MAX_TURNS = 4
ITEM = {"item": str}


def shop(prices: dict[str, int], stock: dict[str, int]) -> Any:
    """Return the tools of one shop."""

    def look_up(shelf: dict[str, int], asked: dict[str, Any]) -> dict[str, Any]:
        found = shelf.get(asked["item"], "There is no such item.")
        return {"content": [{"type": "text", "text": str(found)}]}

    @tool("price", "what an item costs", ITEM)
    async def price(asked: dict[str, Any]) -> dict[str, Any]:
        return look_up(prices, asked)

    @tool("stock", "how many are left", ITEM)
    async def count(asked: dict[str, Any]) -> dict[str, Any]:
        return look_up(stock, asked)

    return create_sdk_mcp_server("shop", tools=[price, count])


async def run_agent(question: str, answer: int, prices: dict[str, int], stock: dict[str, int]) -> float:
    """Answer a customer's question; the reward is 1.0 for the right number and 0.0 otherwise."""
    options = ClaudeAgentOptions(
        model="policy",
        env={**environment(), "CLAUDE_CODE_SIMPLE": "1"},  # leaves out the description of this machine
        stderr=logger.debug,
        system_prompt=SYSTEM,
        tools=[],  # without Claude Code's own
        mcp_servers={"shop": shop(prices, stock)},
        allowed_tools=["mcp__shop__price", "mcp__shop__stock"],
        setting_sources=[],
        max_turns=MAX_TURNS,
        cwd=gettempdir(),
    )
    answer_text = ""
    try:
        async for message in query(prompt=question, options=options):
            if isinstance(message, ResultMessage):
                answer_text = message.result or ""
    except ResultError as error:
        if error.subtype != "error_max_turns":
            raise
    return float(re.findall(r"\d+", answer_text)[-1:] == [str(answer)])
