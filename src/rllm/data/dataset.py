"""A list of tasks, read from where the user keeps them; an error names the file and the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from rllm.errors import ConfigError
from rllm.types import Task

_ID_FIELDS = ("task_id", "id")


class Dataset(Sequence[Task]):
    """Tasks in a fixed order. Each is a mapping; its fields become the arguments of the agent function."""

    def __init__(self, data: Iterable[Mapping[str, Any]], name: str | None = None, split: str | None = None) -> None:
        self.name, self.split = name, split
        self._rows = [self._row(index, row) for index, row in enumerate(data)]

    @classmethod
    def load(cls, path: str | Path) -> Dataset:
        """Read a `.jsonl` file (one object a line) or a `.json` file (a list of objects).

        Raises:
            ConfigError: naming the file and the line.
        """
        source = Path(path).expanduser()
        try:
            text = source.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data={str(path)!r} cannot be read: {error}") from error
        if source.suffix == ".json":
            rows = _parse(text, f"{source}")
            if not isinstance(rows, list):
                raise ConfigError(f"{source} holds a {type(rows).__name__}: use a list of objects")
        elif source.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), start=1)  # `splitlines` also splits at characters that strings may hold
            rows = [_parse(line, f"{source}, line {number}") for number, line in lines if line.strip()]
        else:
            raise ConfigError(f"data={str(path)!r}: files of type {source.suffix!r} are not read; use .jsonl or .json")
        return cls(rows, name=source.stem)

    def shapes(self) -> dict[frozenset[str], int]:
        """Every set of fields that rows have, and the first row that has it."""
        found: dict[frozenset[str], int] = {}
        for index, row in enumerate(self._rows):
            found.setdefault(frozenset(row), index)
        return found

    def task_id(self, index: int) -> str:
        """The row's own `task_id` or `id`, else its number."""
        own = next((self._rows[index][name] for name in _ID_FIELDS if name in self._rows[index]), index)
        return str(own)

    def get_data(self) -> list[Task]:
        """The rows."""
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        return self._rows[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._rows)

    def _row(self, index: int, row: Any) -> Task:
        if not isinstance(row, Mapping):
            where = f"dataset {self.name!r}" if self.name else "the dataset"
            raise ConfigError(f"row {index} of {where} is {row!r}: use an object with a field for each argument")
        return dict(row)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, column {error.colno} is not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an endless number, or nesting without end
        raise ConfigError(f"{where} cannot be read: {error}") from error
