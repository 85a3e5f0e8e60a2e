"""The pages of docs/ as programs: their code blocks, and how to run them on a small machine.

A fence with `title="FILE"` is a file of the page's folder. Every other Python fence runs, in order, with the names of those
before it. In a `sh` fence, lines that begin with `rllm` or `python` run in that folder; `pip`, `make`, `cd` and `export` lines are
read only. Model names, and `$MODEL`, become a tiny policy, and training, by `rllm train` or a program that is given
`model.path=...`, becomes one (more) small step.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'title="([^"]+)"')
MODELS = re.compile(r"Qwen/[\w.\-]+|\$MODEL\b")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
SMALL = ["tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=8"]


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
    """Return the lines of a shell block as arguments; a trailing backslash joins two."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def on_small_machine(words: list[str], policy: Path) -> list[str]:
    """Return the same command for a tiny policy and a single step."""
    words = [MODELS.sub(str(policy), word) for word in words]
    if words[:2] == ["rllm", "train"] or any(word.startswith("model.path=") for word in words):
        chosen = {"num_steps", *(word.partition("=")[0] for word in SMALL)}
        words = [word for word in words if word.partition("=")[0] not in chosen]
        words += [f"num_steps={1 + steps_done(words)}", *SMALL]
    return words


def steps_done(words: list[str]) -> int:
    """Return the number of finished steps of the run that `--resume` names."""
    if "--resume" not in words:
        return 0
    checkpoints = Path(words[words.index("--resume") + 1], "checkpoints").glob("step-*")
    return max(int(folder.name.removeprefix("step-")) for folder in checkpoints)


@cache
def _clone() -> frozenset[Path]:
    """Return the files of the repository, committed or new, and their folders; without git, all files."""
    if not (ROOT / ".git").exists():
        return frozenset(ROOT.rglob("*"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in listed if name and (ROOT / name).exists()]
    return frozenset([*files, *(folder for file in files for folder in file.parents)])


def is_in_clone(path: Path) -> bool:
    return path in _clone()


MARKDOWN = sorted(path for path in _clone() if path.suffix == ".md")


def links(page: Path) -> list[str]:
    """Return the links and images of a Markdown file that lead to other files or headings of the repository."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    found = [*_LINK.findall(text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:", link)]


@cache
def headings(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    seen: dict[str, int] = {}
    found = set()
    for title in _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = seen.setdefault(slug, 0)
        seen[slug] += 1
        found.add(f"{slug}-{number}" if number else slug)
    return frozenset(found)
