"""Traces that several tests of the store use."""

from typing import Any

from rllm.types import Trace


def trace_of(id: str = "a", session_id: str = "s", **changes: Any) -> Trace:
    values: dict[str, Any] = {
        "call_id": id,
        "model": "tiny",
        "messages": [{"role": "user", "content": "2+2?"}],
        "response": {"role": "assistant", "content": "4"},
        "prompt_ids": [1, 70_000, 3],
        "response_ids": [5, 2],
        "logprobs": [-0.5, -0.1],
    }
    return Trace(id=id, session_id=session_id, **(values | changes))


def turn_of(number: int, session_id: str = "s", **changes: Any) -> Trace:
    """Return a turn of a conversation: question, answer, question, ... and the ids of all of it."""
    chat = [{"role": ("user", "assistant")[k % 2], "content": f"word {k} " * 50} for k in range(2 * number + 2)]
    values = {
        "parent_id": f"turn {number - 1}" if number else None,
        "messages": chat[:-1],
        "response": chat[-1],
        "prompt_ids": list(range(1000, 1000 + 30 * number + 20)),
        "response_ids": list(range(1000 + 30 * number + 20, 1000 + 30 * number + 30)),
        "logprobs": [-0.25] * 10,
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "sampling": {"temperature": 1.0, "seed": number},
        "metadata": {"task": 7},
    }
    return trace_of(f"turn {number}", session_id, **(values | changes))
