"""An agent, and the reward that scores it. Change both; `python -m pytest` checks that they still fit each other."""

from __future__ import annotations

import re
from typing import Any

from openai import OpenAI

SYSTEM = "Think step by step. End with a line of its own: Answer: NUMBER"


def agent(question: str, answer: str) -> str:
    """Answer one task; calls to the model at OPENAI_BASE_URL are captured and trained on."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    response = OpenAI().chat.completions.create(model="policy", messages=messages)
    return response.choices[0].message.content or ""


def reward(task: dict[str, Any], text: str) -> float:
    """Return 1 for the right number, 0.1 for another number in the right format, and 0 without a number."""
    found = re.findall(r"^Answer: *(-?\d+)", text, re.MULTILINE)
    if not found:
        return 0.0
    return 1.0 if found[-1] == str(task["answer"]) else 0.1
