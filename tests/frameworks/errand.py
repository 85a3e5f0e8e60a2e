"""Answers of the model in a task that is too long for its window and has a part for a sub-agent.

The notes fill the window, so the agent's program asks for a summary; the price on the menu is looked up by a sub-agent.
Like `Shopper`, the script sees only the prompt, and decides by its contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TASK = (
    "prices.txt has prices, and notes.txt has notes. Read both, let a sub-agent look into the menu, and say what a crème "
    "brûlée and a café au lait cost together."
)
LOOK_UP = "LOOK UP what the café au lait costs, which is in the folder menu."
SUMMARY = """<analysis>
The notes were long, and they do not matter.
</analysis>

<summary>
1. Request: what a crème brûlée and a café au lait cost together.
2. Known so far: a crème brûlée costs 42.85 euro; the notes are of no use.
3. Next: let a sub-agent look into the menu.
</summary>"""
REMEMBERED = "Known so far: a crème brûlée costs 42.85 euro"
FOUND = "It costs 6.20 euro, says the menu."
TITLE = "Prices"
FINAL = "Together they cost 49.05 euro."
FILES: Mapping[str, str] = {
    "prices.txt": "42.85 euro for crème brûlée in a box\n9.10 euro for a tarte tatin\n",
    "menu/cafe.txt": "6.20 euro for café au lait in a cup\n",
    "notes.txt": "".join(f"Note {n}: the kitchen keeps number {n * 7919 % 10007} of it.\n" for n in range(300)),
}
MOST_CALLS = 30


@dataclass(kw_only=True)
class Errand:
    """The script of one rollout."""

    summary_asked: str
    """Words of the program's request for a summary."""
    shell: Callable[[str], str]
    """Call of its shell, with this command."""
    delegate: Callable[[str], str]
    """Call that gives a sub-agent this task."""
    wait: Callable[[str], str] | None = None
    """Call that waits for the sub-agent with this id, if it does not wait by itself."""
    num_calls: int = 0

    def __call__(self, prompt: str) -> str:
        self.num_calls += 1
        if self.summary_asked in prompt:
            return SUMMARY
        if LOOK_UP in prompt and TASK not in prompt and REMEMBERED not in prompt:  # a sub-agent
            return (
                _thought("Found.") + FOUND if "6.20 euro" in prompt else _thought("Open it.") + self.shell("cat menu/*")
            )
        if self.num_calls > MOST_CALLS:
            return "I give up: nobody tells me prices."
        if '"name": "' not in prompt:
            return TITLE
        return self._next(prompt)

    def _next(self, prompt: str) -> str:
        if "6.20 euro" in prompt:
            return _thought("Add them.") + FINAL
        if self.wait and (started := re.findall(r'"agent_id": ?"([\w-]+)"', prompt)):
            return _thought("Wait.") + self.wait(started[-1])
        if REMEMBERED in prompt or "Note 299" in prompt:
            return _thought("Somebody else can look.") + self.delegate(LOOK_UP)
        if "42.85 euro" in prompt:
            return _thought("Now the notes.") + self.shell("cat notes.txt")
        return _thought("Begin with the prices.") + self.shell("grep 'brûlée' prices.txt")


def _thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"
