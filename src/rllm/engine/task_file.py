"""The tasks of a run as lines of a file, so that whoever looks at a rollout later knows what it was given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rllm._runtime.files import lines_of, whole_lines
from rllm._runtime.untrusted import parse_json
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EPISODES, to_json
from rllm.errors import ConfigError, StoreError
from rllm.types import Episode

_TASKS = "tasks.jsonl"
_PLACE = re.compile(r"@\d+\.\d+\.\d+$")
"""What a training run puts behind a task's id to tell one use of the task from another."""

Key = tuple[str, str]
"""Split and id of a task."""


class TaskFile:
    """A tracker that keeps every task which was rolled out, once, in the run's `tasks.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _TASKS
        self._known = set(read_tasks(run_dir))
        self._file: IO[bytes] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tasks have no metrics."""

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            key = (split, plain_task_id(episode.task_id))
            if key not in self._known:
                self._known.add(key)
                self._file = self._file or self._opened()
                self._file.write(to_json({"split": key[0], "task_id": key[1], "task": episode.task}) + b"\n")
        if self._file is not None:
            self._file.flush()

    def _opened(self) -> IO[bytes]:
        """The file, without what a crash left of a last line."""
        file = self._path.open("ab")
        file.truncate(whole_lines(self._path))
        return file

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only episodes have tasks."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_tasks(run_dir: Path) -> dict[Key, Any]:
    """Return the tasks that a run has rolled out; a line that a crash cut off is left out.

    Raises:
        StoreError: if another line is not a task.
    """
    path = run_dir / _TASKS
    tasks: dict[Key, Any] = {}
    for number, line in enumerate(lines_of(path), start=1):
        try:
            row = parse_json(line)
            tasks[row["split"], row["task_id"]] = row["task"]
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"{path}, line {number} is not a task ({error}): delete the line, or the file") from error
    return tasks


def task_of(folder: Path, split: str, task_id: str) -> Any:
    """One task of a run or an evaluation, which is looked for line by line; `None` where its folder does not keep it."""
    wanted = plain_task_id(task_id)
    written = to_json(wanted)  # which takes less to look for than every line takes to parse
    for line in chain(lines_of(folder / _TASKS), lines_of(folder / EPISODES)):
        if written in line:
            row = parse_json(line)
            if row["task_id"] == wanted and row.get("split", split) == split:
                return row["task"]
    return None


def check_ids(data: Dataset, limit: int | None = None) -> None:
    """Rows of one id are one task, since a task is found again by its id.

    Raises:
        ConfigError: naming two of the first `limit` rows that have an id in common, and not all else.
    """
    first_row: dict[str, int] = {}
    for row, task in enumerate(data[:limit]):
        task_id = data.task_id(row)
        first = first_row.setdefault(task_id, row)
        if first != row and to_json(data[first], sort_keys=True) != to_json(task, sort_keys=True):
            raise ConfigError(f"rows {first} and {row} of the dataset have the same id {task_id!r}: make ids unique")


def plain_task_id(task_id: str) -> str:
    """The id as the dataset has it."""
    return _PLACE.sub("", task_id)
