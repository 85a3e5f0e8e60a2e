"""Answers of the model in the tests of frameworks: it asks for two prices, one after the other, and adds them.

Every example has the same task and the same tool, so that only the framework differs. The arguments are those that frameworks
often change when they serialize them again: two spaces, 7.0, nested objects, escapes, letters beyond ASCII, keys in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

TOTAL = "49.05"
"""Of 7.0 crèmes brûlées in gift paper (42.85) and 2.0 cafés au lait (6.20); no prompt has it before the last answer."""
ARGUMENTS = (
    '{"item":  "crème brûlée", "quantity": 7.0, "packing": {"paper": "blue tissue", "gift": true}}',
    '{"quantity": 2.0, "packing": {"gift": false, "paper": "plain \\"kraft\\""},  "item": "caf\\u00e9 au lait"}',
)
PRICES = (42.85, 6.20)
MOST_CALLS = 12
"""A model whose tool never answers gives up, so that a test ends."""


@dataclass(frozen=True, kw_only=True)
class Mood:
    """Style of the model's answers."""

    name: str
    thinks: bool
    """Answers begin with reasoning."""
    comments: bool
    """A comment precedes each tool call."""
    hurries: bool = False
    """All prices are requested in one turn."""


THINKING = Mood(name="thinking", thinks=True, comments=True)
PLAIN = Mood(name="plain", thinks=False, comments=False)
HURRIED = Mood(name="hurried", thinks=True, comments=True, hurries=True)


def hermes_call(prompt: str, arguments: str) -> str:
    """Return a call as Qwen models write it, with the name that the framework gave the tool."""
    named = re.search(r'"name": ?"(\w*price\w*)"', prompt)
    return f'<tool_call>\n{{"name": "{named[1] if named else "price"}", "arguments": {arguments}}}\n</tool_call>'


def sentence(prompt: str, total: str) -> str:
    return f"Together they cost {total} euro."


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Format in which a framework expects tool calls; each function takes the prompt as its first argument."""

    call: Callable[[str, str], str] = hermes_call
    """A tool call with these arguments."""
    final: Callable[[str, str], str] = sentence
    """The last answer, with this total in it."""
    aside: Callable[[str], str | None] = field(default=lambda prompt: None)
    """Answer to other prompts, such as one that asks for a title."""


@dataclass(kw_only=True)
class Shopper:
    """The script of one rollout: the prices in the prompt decide the next answer."""

    mood: Mood
    speech: Speech = field(default_factory=Speech)
    num_calls: int = 0

    def __call__(self, prompt: str) -> str:
        if (aside := self.speech.aside(prompt)) is not None:
            return aside
        self.num_calls += 1
        known = [price for price in PRICES if f"{price:.2f} euro" in prompt]
        if len(known) == len(PRICES):
            return self._thought(f"{known[0]} + {known[1]:.2f}: add them.") + self.speech.final(
                prompt, f"{sum(known):.2f}"
            )
        if self.num_calls > MOST_CALLS:
            return "I give up: the tool does not tell me prices."
        comment = "Let me look up what “that” costs. \n" if self.mood.comments else ""
        thought = self._thought(f"Price number {len(known) + 1} is not known yet, n'est-ce pas ?")
        asked = ARGUMENTS if self.mood.hurries else ARGUMENTS[len(known) : len(known) + 1]
        return thought + comment + "\n".join(self.speech.call(prompt, arguments) for arguments in asked)

    def _thought(self, text: str) -> str:
        return f"<think>\n{text}\n</think>\n\n" if self.mood.thinks else ""
