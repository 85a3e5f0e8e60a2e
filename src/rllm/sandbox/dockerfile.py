"""Dockerfiles for backends that build no images: their steps are taken in each new sandbox.

`FROM` stands for what the backend has instead; `WORKDIR`, `ENV`, `COPY`, `ADD` of files and `RUN` are done, and what
would make another image is refused by name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rllm.errors import last_lines
from rllm.sandbox.base import Command, Sandbox, SandboxError

NAME = "Dockerfile"
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL")
"""Instructions that change nothing for commands that are run in a sandbox."""


@dataclass(frozen=True)
class Copy:
    """Copy a file, or the content of a folder, to a path in the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a command, which must succeed."""

    command: Command
    cwd: str
    env: Mapping[str, str]
    line: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Content of a Dockerfile."""

    path: Path
    base: str
    """Image that `FROM` names."""
    workdir: str | None
    env: Mapping[str, str]
    steps: tuple[Copy | Run, ...]


def read_dockerfile(folder: Path) -> Recipe:
    """Return the steps of the Dockerfile in a folder.

    Raises:
        SandboxError: naming the line that is not supported, with the remedy.
    """
    return _Reader(folder).read()


async def build(recipe: Recipe, sandbox: Sandbox, *, timeout_s: float = 600.0) -> None:
    """Take the steps in a new sandbox, each command within `timeout_s`.

    Raises:
        SandboxError: if a file cannot be copied or a command fails, with the end of its output.
    """
    for step in recipe.steps:
        if isinstance(step, Copy):
            await sandbox.upload(step.source, step.target)
            continue
        if step.command == _make(sandbox.workdir):  # it is there from the start
            continue
        ended = await sandbox.exec(step.command, cwd=step.cwd, env=step.env, timeout_s=timeout_s)
        if not ended.ok:
            failure = f"{ended.failure(timeout_s)}: {last_lines(ended.output)}"
            raise SandboxError(f"{recipe.path}, line {step.line}: {failure}")


def _make(folder: str) -> Command:
    return ["mkdir", "-p", folder]


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.base = ""
        self.workdir: str | None = None
        self.env: dict[str, str] = {}
        self.steps: list[Copy | Run] = []
        self.line = 0
        self.readers: dict[str, Callable[[str], None]] = {
            "FROM": self.read_from,
            "WORKDIR": self.read_workdir,
            "ENV": self.read_env,
            "COPY": self.read_copy,
            "ADD": self.read_copy,
            "RUN": self.read_run,
            "USER": self.read_user,
        }

    def read(self) -> Recipe:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SandboxError(f"{self.path} cannot be read: {error}") from error
        for self.line, instruction, rest in _instructions(text):
            if instruction in _WITHOUT_EFFECT:
                continue
            if instruction not in self.readers or not rest:
                raise self.refused(f"{instruction} {'is not supported' if rest else 'without arguments'}")
            self.readers[instruction](rest)
        if not self.base:
            raise SandboxError(f"{self.path} has no FROM")
        return Recipe(path=self.path, base=self.base, workdir=self.workdir, env=dict(self.env), steps=tuple(self.steps))

    def refused(self, problem: str) -> SandboxError:
        return SandboxError(f"{self.path}, line {self.line}: {problem} without building an image; use sandbox=podman")

    def read_from(self, rest: str) -> None:
        if self.base:
            raise self.refused("a second FROM is not supported")
        self.base = next((word for word in self.words(rest) if not word.startswith("--")), "")

    def read_workdir(self, rest: str) -> None:
        self.workdir = self.absolute(self.plain(rest))
        self.steps.append(self.run(_make(self.workdir), cwd="/"))

    def read_env(self, rest: str) -> None:
        words = self.words(rest)
        pairs = [word.partition("=") for word in words]
        if not all(separator for _, separator, _ in pairs):  # the old form: ENV NAME the value
            pairs = [(words[0], "=", rest.partition(words[0])[2].strip())]
        self.env.update({name: self.plain(value) for name, _, value in pairs})

    def read_copy(self, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else self.words(rest)
        if len(words) < 2 or any(word.startswith("--") or "://" in word or "<<" in word for word in words):
            raise self.refused(f"COPY {rest!r} is not supported")
        *sources, target = map(self.plain, words)
        into_folder = len(sources) > 1 or target.endswith(("/", "/.")) or target == "."
        for source in (path for pattern in sources for path in self.matching(pattern)):
            place = PurePosixPath(self.absolute(target))
            self.steps.append(Copy(source, str(place / source.name if into_folder and source.is_file() else place)))

    def read_run(self, rest: str) -> None:
        if rest.startswith("--") or "<<" in rest:
            raise self.refused("RUN with options or a here-document is not supported")
        try:
            command: Command = [str(word) for word in json.loads(rest)] if rest.startswith("[") else rest
        except ValueError:
            command = rest
        self.steps.append(self.run(command, cwd=self.workdir or "/"))

    def read_user(self, rest: str) -> None:
        if rest.strip() not in ("root", "0", "0:0"):
            raise self.refused(f"USER {rest} is not supported")

    def run(self, command: Command, *, cwd: str) -> Run:
        return Run(command=command, cwd=cwd, env=dict(self.env), line=self.line)

    def matching(self, pattern: str) -> list[Path]:
        """Return the files of the folder that a pattern names."""
        inside = pattern.lstrip("/") or "."
        found = [self.folder] if inside in (".", "./") else sorted(self.folder.glob(inside))
        if not found or any(not path.resolve().is_relative_to(self.folder.resolve()) for path in found):
            raise SandboxError(f"{self.path}, line {self.line}: the folder has no {pattern!r} to copy")
        return found

    def absolute(self, path: str) -> str:
        return str(PurePosixPath(self.workdir or "/", path))

    def plain(self, text: str) -> str:
        if "$" in text:
            raise self.refused(f"a variable in {text!r} is not supported")
        return text.strip()

    def words(self, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self.refused(f"{text!r} is not supported ({error})") from error


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each instruction's first line, its name and its arguments."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        continues = re.search(r"\\\s*$", line)
        parts.append(line[: continues.start()] if continues else line)
        if not continues:
            name, _, rest = " ".join(parts).strip().partition(" ")
            yield first, name.upper(), rest.strip()
            parts = []
