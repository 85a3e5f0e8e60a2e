"""List of tasks, read from files, the Hugging Face hub or a function. Errors name the file and the row."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rllm.data.rows import Table, tasks_of
from rllm.data.sources import name_of, rows_of
from rllm.errors import ConfigError, counted, shown
from rllm.types import Task, task_id_of

if TYPE_CHECKING:
    from rllm.data.registry import DatasetRegistry as DatasetRegistry

_ROUNDING = 1e-9
"""Tolerance for fractions that should sum to 1."""


class Dataset(Sequence[Task]):
    """Tasks in a fixed order. Each is a plain dict; its fields become the arguments of the agent function.

    Datasets made from another one (`repeat`, `shuffle`, `select`, `split_into`) have copies of its rows, which keep
    their task ids: copies of a task count as one task, and a task has the same id in every part.
    """

    stored_at: Path | None = None
    """File of the registry with exactly these rows; `None` if there is none."""

    def __init__(self, data: Iterable[Mapping[str, Any]], name: str | None = None, split: str | None = None) -> None:
        """Read rows; `name` and `split` are labels.

        Raises:
            ConfigError: if a row is not a mapping, or if `data` is a path, a function, or an exhausted generator.
        """
        _check_rows(data)
        self.name, self.split = name, split
        where = f"dataset {name!r}" if name else "the dataset"
        self._rows = list(tasks_of(data, where))
        self._numbers: Sequence[int] = range(len(self._rows))

    @classmethod
    def of_tasks(cls, tasks: list[Task], name: str | None = None, split: str | None = None) -> Dataset:
        """Return a dataset of tasks, without a check or a copy."""
        made = cls((), name=name, split=split)
        made._rows, made._numbers = tasks, range(len(tasks))
        return made

    @classmethod
    def load(
        cls,
        source: str | Path | Callable[[], Iterable[Mapping[str, Any]]],
        *,
        split: str | None = None,
        subset: str | None = None,
    ) -> Dataset:
        """Read a file, a folder or id of Hugging Face datasets, or a function.

        * `tasks.jsonl` (one object a line), `.json` (a list of objects), `.csv` (all values are text), `.parquet`,
          `.arrow`;
        * `hf:org/name`, `org/name`, or a folder that `datasets` saved or can read, with `split` and `subset` where it
          has several;
        * a function that returns rows, or its `package.module:function`. It is called once.

        Raises:
            ConfigError: if it cannot be read or holds no rows; the message names the file and the line or row.
            MissingDependencyError: if it needs `datasets` or `pyarrow`.
        """
        rows, name = rows_of(source, split=split, subset=subset), name_of(source)
        if not rows:
            raise ConfigError(f"{name} is empty: {str(source)!r} holds no rows")
        return cls.of_tasks(rows, name=name, split=split)

    @classmethod
    def load_data(cls, path: str | Path) -> Dataset:
        """Read a file; the same as `load`."""
        return cls.load(path)

    def repeat(self, n: int) -> Dataset:
        """Return every row `n` times, with copies next to each other."""
        if n < 1:
            raise ConfigError(f"repeat({n}): use at least 1")
        return self.select(index for index in range(len(self)) for _ in range(n))

    def shuffle(self, seed: int | None = 0) -> Dataset:
        """Return the rows in an order that depends on `seed` alone; `None` gives a new order each time."""
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        return self.select(order)

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return the rows at these places, in this order.

        Raises:
            ConfigError: if a row does not exist.
        """
        places = list(indices)
        for place in places:
            if not -len(self) <= place < len(self):
                raise ConfigError(f"select: there is no row {place}, the dataset has {len(self)}")
        chosen = Dataset.of_tasks([dict(self._rows[place]) for place in places], name=self.name, split=self.split)
        chosen._numbers = [self._numbers[place] for place in places]
        return chosen

    def split_into(self, *sizes: float, seed: int | None = 0) -> list[Dataset]:
        """Shuffle, and cut into parts of these sizes: numbers of rows, or fractions. The rest is one more part.

        `train, val = data.split_into(0.9)`; `train, val, rest = data.split_into(800, 100)`.

        Raises:
            ConfigError: if there are too few rows, or if a part would be empty.
        """
        shuffled = self.shuffle(seed)
        cuts = _cuts(sizes, len(self))
        parts = [shuffled.select(range(start, stop)) for start, stop in pairwise(cuts)]
        if not all(parts):
            lengths = [len(part) for part in parts]
            raise ConfigError(f"split_into{sizes} gives parts of {lengths} rows: every part needs at least one")
        return parts

    def shapes(self) -> dict[frozenset[str], int]:
        """Return each set of fields that rows have, with the first row that has it."""
        found: dict[frozenset[str], int] = {}
        for index, row in enumerate(self._rows):
            found.setdefault(frozenset(row), index)
        return found

    def task_id(self, index: int) -> str:
        """Return the row's own `task_id` or `id`, or else its number in the original dataset, as valid Unicode."""
        return task_id_of(self._rows[index], self._numbers[index])

    def get_data(self) -> list[Task]:
        """Return the rows."""
        return self._rows

    def get_data_path(self) -> str | None:
        """Return the registry's file of these rows, or `None` if they are not registered."""
        return None if self.stored_at is None else str(self.stored_at)

    def get_verl_data_path(self) -> str | None:
        """Write these rows as a Parquet file for verl and return its path; `None` if they are not registered.

        Raises:
            ConfigError: if a field has values of several types, which Parquet cannot hold.
            MissingDependencyError: without `pyarrow`.
        """
        if self.stored_at is None:
            return None
        from rllm.data.registry import write_verl_parquet

        path = self.stored_at.with_suffix(".parquet")
        write_verl_parquet(self._rows, path, data_source=self.name or "")
        return str(path)

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

    def __repr__(self) -> str:
        return f"Dataset(name={self.name!r}, split={self.split!r}, {counted(len(self), 'row')})"


def _check_rows(data: Any) -> None:
    """Refuse values that do not iterate over rows."""
    if isinstance(data, str | bytes | Path) or (callable(data) and not isinstance(data, Iterable)):
        raise ConfigError(f"Dataset({shown(data)}): give it rows; files and functions are read by Dataset.load")
    if isinstance(data, Mapping):
        raise ConfigError(f"Dataset({shown(data)}): give it a list of rows, each an object")
    if not isinstance(data, Iterable) and Table.of(data) is None:
        raise ConfigError(f"Dataset({shown(data)}): give it a list of rows")
    if inspect.isgenerator(data) and inspect.getgeneratorstate(data) == inspect.GEN_CLOSED:
        raise ConfigError(f"the generator {data.__name__!r} is exhausted: call its function again, or keep its dataset")


def _cuts(sizes: Sequence[float], num_rows: int) -> list[int]:
    """Return the bounds of the parts, including the rest."""
    if not sizes or not num_rows or not all(size > 0 for size in sizes):
        raise ConfigError(f"split_into{tuple(sizes)}: use numbers of rows, or fractions between 0 and 1")
    are_numbers = {isinstance(size, int) for size in sizes}
    if len(are_numbers) > 1:
        raise ConfigError(f"split_into{tuple(sizes)}: use only numbers of rows, or only fractions")
    whole = num_rows if are_numbers == {True} else 1.0
    sums = list(accumulate(sizes, initial=0.0))
    rest = whole - sums[-1]
    if rest < -_ROUNDING:
        raise ConfigError(
            f"split_into{tuple(sizes)}: the data has {counted(num_rows, 'row')}; the sizes may sum to {whole}"
        )
    cuts = [round(num_rows * cut / whole) for cut in sums]
    return [*cuts, num_rows] if rest > _ROUNDING else cuts


def __getattr__(name: str) -> Any:
    """Return `DatasetRegistry`, which users import from here too; it needs this module, so it is imported lazily."""
    if name == "DatasetRegistry":
        from rllm.data.registry import DatasetRegistry

        return DatasetRegistry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
