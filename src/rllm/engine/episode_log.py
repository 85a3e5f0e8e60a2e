"""Files with a line for each episode or task, so that a crash loses nothing that was finished.

A line is written with one system call and counts once it ends with a newline: a line torn by a crash is never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self

from rllm._runtime.files import lines_of, whole_lines
from rllm._runtime.untrusted import MAX_UNPACKED_BYTES, parse_json
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, StoreError
from rllm.store.codec import readable_json
from rllm.tracking.base import Tracker
from rllm.types import Episode

EPISODES = "episodes.jsonl"
"""Name of the log in an evaluation's folder."""


class EpisodeLog:
    """Append-only JSONL file of episodes; `EpisodeLog.read` reads them.

    Values in tasks, observations and infos that are not JSON become the closest JSON value (an array a list, a path a
    string, NaN null), or else text.
    """

    def __init__(self, path: str | Path, *, tokens: bool = True) -> None:
        """Open for appending, without a torn last line; `tokens=False` leaves out ids, which the trace store has."""
        self.path = Path(path)
        self._tokens = tokens
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            self._file.truncate(whole_lines(self.path))
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def append(self, episode: Episode) -> None:
        """Write one line, and hand it to the operating system; raise `StoreError` if it cannot be written."""
        data = episode.to_dict()
        if not self._tokens:
            for step in (step for trajectory in data["trajectories"] for step in trajectory["steps"]):
                for name in ("prompt_ids", "response_ids", "logprobs"):
                    del step[name]
        line = memoryview(readable_json(data) + b"\n")
        try:
            while line:  # a partial write is followed by an error
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read(path: str | Path) -> Iterator[Episode]:
        """Yield the episodes of a file, if it exists; raise `StoreError` for a line that is not an episode."""
        for number, line in enumerate(lines_of(Path(path)), start=1):
            try:
                yield Episode.from_dict(parse_json(line, limit=MAX_UNPACKED_BYTES))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{path}, line {number} is not an episode ({error}): delete the line, or the file"
                ) from error

    def _cannot_be_written(self, error: OSError) -> StoreError:
        return StoreError(f"episodes cannot be written to {str(self.path)!r}: {error.strerror or error}")


_TASKS = "tasks.jsonl"
_PLACE = re.compile(r"@\d+\.\d+\.\d+$")
"""Suffix of a task's id that distinguishes its uses in a training run."""

Key = tuple[str, str]
"""Split and id of a task."""


class TaskFile(Tracker):
    """Tracker that writes every task that was rolled out, once, to the run's `tasks.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _TASKS
        self._known = set(read_tasks(run_dir))
        self._file: IO[bytes] | None = None

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            key = (split, plain_task_id(episode.task_id))
            if key not in self._known:
                self._known.add(key)
                if self._file is None:
                    self._file = self._path.open("ab")
                    self._file.truncate(whole_lines(self._path))
                self._file.write(readable_json({"split": key[0], "task_id": key[1], "task": episode.task}) + b"\n")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_tasks(run_dir: Path) -> dict[Key, Any]:
    """Return the tasks that a run has rolled out; raise `StoreError` for a line that is not a task, unless torn."""
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
    """Return one task of a run or an evaluation; `None` if its folder does not have it."""
    wanted = plain_task_id(task_id)
    written = readable_json(wanted)  # searching for it is cheaper than parsing every line
    for line in chain(lines_of(folder / _TASKS), lines_of(folder / EPISODES)):
        if written in line:
            row = parse_json(line)
            if row["task_id"] == wanted and row.get("split", split) == split:
                return row["task"]
    return None


def check_ids(data: Dataset, limit: int | None = None) -> None:
    """Check that rows with one id are the same task, since a task is found by its id.

    Raises:
        ConfigError: if two of the first `limit` rows have the same id and different content.
    """
    first_row: dict[str, int] = {}
    for row, task in enumerate(data[:limit]):
        task_id = data.task_id(row)
        first = first_row.setdefault(task_id, row)
        if first != row and readable_json(data[first], sort_keys=True) != readable_json(task, sort_keys=True):
            raise ConfigError(f"rows {first} and {row} of the dataset have the same id {task_id!r}: make ids unique")


def plain_task_id(task_id: str) -> str:
    """Return a task's id in the dataset."""
    return _PLACE.sub("", task_id)
