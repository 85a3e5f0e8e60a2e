"""Training data and a model for the agent, without network: the demo's shops, and a tiny model that mostly guesses.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from agent import SYSTEM

from rllm.demo.tasks import CAREFUL, SLOPPY, Clerk, conversations, shop_tasks
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message, Task

SETTINGS = {
    "num_steps": 4,
    "tasks_per_step": 8,
    "rollout": {"group_size": 6, "max_tokens": 48, "timeout_s": 300, "max_concurrent": 8},
    "algorithm": {"name": "rloo", "aggregation": "seq-mean-token-sum"},
    "optim": {"lr": 5e-4},
    "eval": {"every": 4},
}
NUM_HELD_OUT = 60
SERVER = "mcp__shop__"
"""Prefix of the tools of an MCP server named `shop` in Claude Code."""
IDENTITY = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
"""Text that Claude Code puts before any system prompt."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"{SERVER}{name}",
            "description": description,
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
    for name, description in [("price", "what an item costs"), ("stock", "how many are left")]
]


def tasks(seed: int) -> tuple[list[Task], list[Task]]:
    """Return questions of customers to train on, and held-out ones."""
    return shop_tasks(400, seed=seed), shop_tasks(NUM_HELD_OUT, seed=seed + 10_000)


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(_conversations, CAREFUL),
        partial(_conversations, SLOPPY),
        TOOLS,
        recipe=TinyPolicyRecipe(skill_steps=120, habit_steps=30),
    )


def _conversations(clerk: Clerk, seed: int) -> Iterator[list[Message]]:
    """Yield a clerk's conversations in the form of Claude Code."""
    system: Message = {
        "role": "system",
        "content": [{"type": "text", "text": IDENTITY}, {"type": "text", "text": SYSTEM}],
    }
    for _, *chat in conversations(clerk, system=SYSTEM, seed=seed):
        for message in chat:
            for call in message.get("tool_calls", ()):
                call["function"]["name"] = SERVER + call["function"]["name"]
        yield [system, *chat]


if __name__ == "__main__":
    print(policy())
