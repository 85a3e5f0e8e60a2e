"""Answers of the model to agents whose tool is a shell: a price is a line of a file, which it copies into another."""

from __future__ import annotations

import json
from typing import Any


def copying(arguments: str) -> str:
    """Return the command that shows and keeps the price that a call of the tool `price` would ask for."""
    return f"grep '{json.loads(arguments)['item']}' prices.txt | tee -a bill.txt"


def called(tool: str, arguments: dict[str, Any]) -> str:
    """Return a call as Qwen models write it, with one more space than clients use."""
    written = json.dumps(arguments, ensure_ascii=False).replace('": ', '":  ', 1)
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {written}}}\n</tool_call>'
