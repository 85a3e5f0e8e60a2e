"""The pages of docs/ as programs: what their fences hold, and how a small machine runs it.

A fence with `title="FILE"` is a file of the page's folder. Every other Python fence runs, in order, with the names of those
before it. In a `sh` fence, lines that begin with `rllm` or `python` run in that folder; `pip`, `make` and `cd` lines are read only.
Model names become a tiny policy, and training becomes one small step.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'title="([^"]+)"')
MODELS = re.compile(r"Qwen/[\w.\-]+")
SMALL = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=8"]


@dataclass(frozen=True, slots=True)
class Fence:
    """One block of code."""

    language: str
    title: str | None
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"line {self.line}"


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        title = _TITLE.search(found["rest"])
        inner = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Fence(found["language"], title[1] if title else None, inner, text[: found.start()].count("\n") + 1)


def commands(fence: Fence) -> Iterator[list[str]]:
    """The lines of a shell block as arguments; a trailing backslash joins two."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def on_small_machine(words: list[str], policy: Path) -> list[str]:
    """The same command for a tiny policy and a single step."""
    words = [MODELS.sub(str(policy), word) for word in words]
    if words[:2] == ["rllm", "train"]:
        chosen = {word.partition("=")[0] for word in SMALL}
        words = [word for word in words if word.partition("=")[0] not in chosen] + SMALL
    return words
