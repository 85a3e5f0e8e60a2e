"""Small generated tasks with files: create, rename, copy, delete, collect, search, count and edit.

`tasks:shell?size=40&seed=0` makes them as task folders, so that everything that runs a task folder runs these.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from rllm._runtime.files import cache_folder, whole_folder
from rllm.data.benchmark_rows import distinct_tasks

NOUNS = (
    *("ant", "bell", "cake", "desk", "east", "fork", "goat", "hill", "iron", "jam", "kite", "lamp", "moon", "nest"),
    *("oak", "pear", "quay", "rain", "salt", "tent", "vase", "wolf", "yarn", "zinc"),
)
"""Words in the files, and, with a digit, in their names."""
NUM_FILES, NUM_LINES = 3, 6
_TOML = """\
version = "1.0"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
"""
_DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
COPY files/ /app/
"""
_TEST = """\
#!/bin/sh
# The folder must be exactly as expected.
if diff -r /tests/expected /app; then reward=1; else reward=0; fi
mkdir -p /logs/verifier
echo $reward > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, kw_only=True)
class ShellTask:
    """A folder, what to do in it, and the result."""

    kind: str
    instruction: str
    files: dict[str, str]
    """Files of the folder, by path."""
    command: str
    """A command that solves it."""
    expected: dict[str, str]
    """Files afterwards."""

    def write(self, folder: Path) -> None:
        """Write it as a task folder."""
        for path, text in {
            "task.toml": _TOML,
            "instruction.md": self.instruction + "\n",
            "environment/Dockerfile": _DOCKERFILE,
            "solution/solve.sh": f"#!/bin/sh\n{self.command}\n",
            "tests/test.sh": _TEST,
            **{f"environment/files/{path}": text for path, text in self.files.items()},
            **{f"tests/expected/{path}": text for path, text in self.expected.items()},
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")


def shell_tasks(size: int, *, seed: int) -> list[ShellTask]:
    """Return distinct tasks, all kinds in turn; the same for the same seed.

    Raises:
        ConfigError: if there are fewer than `size`.
    """
    kinds = list(KINDS)

    def make(rng: random.Random, number: int) -> ShellTask:
        kind = kinds[number % len(kinds)]
        names = [f"{noun}{rng.randrange(10)}.txt" for noun in rng.sample(NOUNS, NUM_FILES + 1)]
        files = {name: _text(rng) for name in names[:NUM_FILES]}
        instruction, command, expected = KINDS[kind](files, names[NUM_FILES], rng)
        return ShellTask(kind=kind, instruction=instruction, files=files, command=command, expected=expected)

    return distinct_tasks(make, size, seed=seed, key=lambda task: task.instruction)


def shell_task_folders(size: int, *, seed: int) -> Path:
    """Return a folder of task folders `000-create` and so on, written when it is first needed."""
    tasks = shell_tasks(size, seed=seed)
    digest = sha256(json.dumps([_TOML, _DOCKERFILE, _TEST, [asdict(task) for task in tasks]]).encode())
    folder = cache_folder() / "tasks" / f"shell-{seed}-{size}-{digest.hexdigest()[:12]}"
    if not folder.exists():
        with whole_folder(folder) as new:
            for number, task in enumerate(tasks):
                task.write(new / f"{number:03}-{task.kind}")
    return folder


def _text(rng: random.Random) -> str:
    return "".join(f"{word}\n" for word in rng.sample(NOUNS, rng.randint(1, NUM_LINES)))


_Made = tuple[str, str, dict[str, str]]
"""Instruction, command, files afterwards."""


def _create(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    word = rng.choice(NOUNS)
    return f"Create the file {new} with the word {word}.", f"echo {word} > {new}", {**files, new: f"{word}\n"}


def _rename(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    old = rng.choice(list(files))
    rest = {name: text for name, text in files.items() if name != old}
    return f"Rename {old} to {new}.", f"mv {old} {new}", {**rest, new: files[old]}


def _copy(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    old = rng.choice(list(files))
    return f"Copy {old} to {new}.", f"cp {old} {new}", {**files, new: files[old]}


def _delete(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    old = rng.choice(list(files))
    return f"Delete {old}.", f"rm {old}", {name: text for name, text in files.items() if name != old}


def _collect(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    names = sorted(files)
    text = "".join(files[name] for name in names)
    return f"Join all files into {new}.", f"cat *.txt > {new}", {**files, new: text}


def _search(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    word = rng.choice(files[rng.choice(list(files))].split())
    found = "".join(f"{name}\n" for name in sorted(files) if word in files[name].split())
    return (
        f"Write the names of the files with the word {word} to {new}.",
        f"grep -l {word} *.txt > {new}",
        {**files, new: found},
    )


def _count(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    old = rng.choice(list(files))
    lines = files[old].count("\n")
    return f"Write the number of lines of {old} to {new}.", f"wc -l < {old} > {new}", {**files, new: f"{lines}\n"}


def _edit(files: dict[str, str], new: str, rng: random.Random) -> _Made:
    old = rng.choice(list(files))
    word = rng.choice(files[old].split())
    other = rng.choice([noun for noun in NOUNS if noun != word])
    changed = files[old].replace(word, other)
    return f"Replace {word} by {other} in {old}.", f"sed -i s/{word}/{other}/ {old}", {**files, old: changed}


KINDS: dict[str, Callable[[dict[str, str], str, random.Random], _Made]] = {
    "create": _create,
    "rename": _rename,
    "copy": _copy,
    "delete": _delete,
    "collect": _collect,
    "search": _search,
    "count": _count,
    "edit": _edit,
}
"""Kinds of tasks: functions of the files, an unused name and a source of randomness."""
