"""Datasets: lists of tasks, of one source or several, and their registry on disk."""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import overload

from rllm._runtime.files import lock, new_file
from rllm.data.benchmarks import BENCHMARKS
from rllm.data.rows import Table, json_value, tasks_of
from rllm.data.sources import name_of, read_file, rows_of
from rllm.errors import ConfigError, counted, needed, shown
from rllm.types import JSONMapping, JSONObject, Task, task_id_of

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"
PREPARED = frozenset({"grid_world", *BENCHMARKS})
"""Datasets that `rllm.data.prepare` registers."""

_ROUNDING = 1e-9
"""Tolerance for fractions that should sum to 1."""
_NAME = re.compile(r"\w[\w.+-]*")
_LONGEST_NAME = 100
_VERL_PROMPT = [{"role": "user", "content": "The agent writes the prompt."}]
"""Placeholder: verl needs a prompt in each row, and the agent makes its own from the task."""


class Dataset(Sequence[Task]):
    """Tasks in a fixed order. Each is a plain dict; its fields become the arguments of the agent function.

    Datasets made from another one (`repeat`, `shuffle`, `select`, `split_into`) have copies of its rows, which keep
    their task ids: copies of a task count as one task, and a task has the same id in every part.
    """

    stored_at: Path | None = None
    """File of the registry with exactly these rows; `None` if there is none."""

    def __init__(self, data: Iterable[JSONMapping], name: str | None = None, split: str | None = None) -> None:
        """Read rows; `name` and `split` are labels.

        Raises:
            ConfigError: if a row is not a mapping, or if `data` is a path, a function, or an exhausted generator.
        """
        if isinstance(data, str | bytes | Path) or (callable(data) and not isinstance(data, Iterable)):
            raise ConfigError(f"Dataset({shown(data)}): pass rows; Dataset.load reads files and functions")
        if isinstance(data, Mapping) or (not isinstance(data, Iterable) and Table.of(data) is None):
            raise ConfigError(f"Dataset({shown(data)}): pass a list of rows, each a dict")
        if inspect.isgenerator(data) and inspect.getgeneratorstate(data) == inspect.GEN_CLOSED:
            raise ConfigError(
                f"the generator {data.__name__!r} is exhausted: call its function again, or keep its dataset"
            )
        self.name, self.split = name, split
        self._rows = list(tasks_of(data, f"dataset {name!r}" if name else "the dataset"))
        self._numbers: Sequence[int] = range(len(self._rows))
        self._sources: Sequence[str] = ()

    @classmethod
    def of_tasks(cls, tasks: list[Task], name: str | None = None, split: str | None = None) -> Dataset:
        """Return a dataset of tasks, without a check or a copy."""
        made = cls((), name=name, split=split)
        made._rows, made._numbers = tasks, range(len(tasks))
        return made

    @classmethod
    def load(
        cls,
        source: str | Path | Callable[[], Iterable[JSONMapping]],
        *,
        split: str | None = None,
        subset: str | None = None,
    ) -> Dataset:
        """Read a file, a folder or id of Hugging Face datasets, or a function.

        * `tasks.jsonl` (one object a line), `.json` (a list of objects), `.csv` (all values are text), `.parquet`;
        * `hf:org/name`, `org/name`, or a folder that `datasets` saved or can read, with `split` and `subset` where it
          has several;
        * a function that returns rows, or its `package.module:function`. It is called once.

        Raises:
            ConfigError: if it cannot be read or holds no rows; the message names the file and the line or row.
            MissingDependencyError: if it needs `datasets` or `pyarrow`.
        """
        rows, name = rows_of(source, split=split, subset=subset), name_of(source)
        if not rows:
            raise ConfigError(f"{name} is empty: {str(source)!r} has no rows")
        return cls.of_tasks(rows, name=name, split=split)

    @classmethod
    def load_data(cls, path: str | Path) -> Dataset:
        """Read a file; the same as `load`."""
        return cls.load(path)

    @classmethod
    def concatenate(cls, datasets: Sequence[Dataset]) -> Dataset:
        """Return the tasks of several datasets in one, each with its source and a task id such as `math/17`.

        A source is named by the `name` of its dataset; of equal names the later ones get a number (`math-2`).
        """
        names: list[str] = []
        for data in datasets:
            name = data.name or "data"
            number = 1 + sum(other == name or other.startswith(f"{name}-") for other in names)
            names.append(name if number == 1 else f"{name}-{number}")
        whole = cls.of_tasks([row for data in datasets for row in data], name="+".join(names))
        whole._numbers = [number for data in datasets for number in data._numbers]
        whole._sources = [name for name, data in zip(names, datasets, strict=True) for _ in data]
        return whole

    @property
    def sources(self) -> list[str]:
        """The names of the datasets that this one was made of, in their order; empty for a single one."""
        return list(dict.fromkeys(self._sources))

    def source_of(self, index: int) -> str | None:
        """Return the source of a row; `None` if there is only one."""
        return self._sources[index] if self._sources else None

    def rows_by_source(self) -> dict[str, list[int]]:
        """Return the row numbers of each source."""
        rows: dict[str, list[int]] = {name: [] for name in self.sources}
        for row, name in enumerate(self._sources):
            rows[name].append(row)
        return rows

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
                raise ConfigError(f"select: there is no row {place}; the dataset has {counted(len(self), 'row')}")
        chosen = Dataset.of_tasks([dict(self._rows[place]) for place in places], name=self.name, split=self.split)
        chosen._numbers = [self._numbers[place] for place in places]
        chosen._sources = [self._sources[place] for place in places] if self._sources else ()
        return chosen

    def split_into(self, *sizes: float, seed: int | None = 0) -> list[Dataset]:
        """Shuffle, and cut into parts of these sizes: numbers of rows, or fractions. The rest is one more part.

        `train, val = data.split_into(0.9)`; `train, val, rest = data.split_into(800, 100)`.

        Raises:
            ConfigError: if there are too few rows, or if a part would be empty.
        """
        shuffled = self.shuffle(seed)
        parts = [shuffled.select(range(start, stop)) for start, stop in pairwise(_cuts(sizes, len(self)))]
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
        """Return the row's own `task_id` or `id`, or else its number in the original dataset, as valid Unicode.

        With several sources, the name of the row's source comes first.
        """
        own = task_id_of(self._rows[index], self._numbers[index])
        source = self.source_of(index)
        return own if source is None else f"{source}/{own}"

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
        path = self.stored_at.with_suffix(".parquet")
        _write_verl_parquet(self._rows, path, data_source=self.name or "")
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


def _cuts(sizes: Sequence[float], num_rows: int) -> list[int]:
    """Return the bounds of the parts, including the rest."""
    called = f"split_into{tuple(sizes)}"
    if not sizes or not num_rows or not all(size > 0 for size in sizes):
        raise ConfigError(f"{called}: use numbers of rows, or fractions between 0 and 1")
    are_numbers = {isinstance(size, int) for size in sizes}
    if len(are_numbers) > 1:
        raise ConfigError(f"{called}: use only numbers of rows, or only fractions")
    whole = num_rows if are_numbers == {True} else 1.0
    sums = list(accumulate(sizes, initial=0.0))
    rest = whole - sums[-1]
    if rest < -_ROUNDING:
        raise ConfigError(f"{called}: the dataset has {counted(num_rows, 'row')}; the sizes may sum to {whole}")
    cuts = [round(num_rows * cut / whole) for cut in sums]
    return [*cuts, num_rows] if rest > _ROUNDING else cuts


class DatasetRegistry:
    """Keeps each split as `datasets/<name>/<split>.jsonl` under `$RLLM_HOME`, or else `~/.rllm`.

    Processes may register a split at the same time; it then has the rows of one of them. Names consist of letters,
    digits and any of `_.+-`; every method raises `ConfigError` for other names.
    """

    @classmethod
    def register_dataset(
        cls, name: str, data: Iterable[JSONMapping], split: str = "default", **metadata: object
    ) -> Dataset:
        """Store the rows of a split, replacing earlier ones, and metadata about them.

        Raises:
            ConfigError: if there are no rows, or if JSON cannot hold a value; the message names the row and the field.
        """
        path = file_of(name, split)
        given = Dataset(data, name=name, split=split)
        if not given:
            raise ConfigError(f"dataset {name!r}, split {split!r}: there are no rows to register")
        rows = [json_value(row, f"row {index} of dataset {name!r}") for index, row in enumerate(given)]
        notes = json_value(metadata, f"metadata of dataset {name!r}")
        with _writing():
            path.parent.mkdir(exist_ok=True)
            for file, values in ((_metadata_file(path), [notes]), (path, rows)):
                # ASCII, which can hold strings that are not valid Unicode.
                with new_file(file) as draft, draft.open("w", encoding="ascii") as lines:
                    lines.writelines(json.dumps(value) + "\n" for value in values)
        return _stored(rows, path, name, split)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        """Return the rows of a split; `None` if it is not registered, with a warning that lists the registered ones."""
        path = file_of(name, split)
        if path.exists():
            return _stored(read_file(path), path, name, split)
        if splits := cls.get_dataset_splits(name):
            logger.warning("dataset %r has no split %r; it has %s", name, split, ", ".join(splits))
        else:
            names = ", ".join(cls.get_dataset_names()) or "none"
            remedy = f"; `python -m rllm.data.prepare {name}` registers it" if name in PREPARED else ""
            logger.warning("dataset %r is not registered%s; registered datasets: %s", name, remedy, names)
        return None

    @classmethod
    def get_metadata(cls, name: str, split: str = "default") -> JSONObject:
        """Return the metadata of a split; empty if it is not registered."""
        path = _metadata_file(file_of(name, split))
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        """Return the names of all registered datasets, sorted."""
        return sorted({file.parent.name for file in datasets_folder().glob(f"*/[!.]*{SUFFIX}")})

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """Return the names of a dataset's splits, sorted."""
        return sorted(file.name.removesuffix(SUFFIX) for file in _folder_of(name).glob(f"[!.]*{SUFFIX}"))

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        """Return True if the split is registered; without a split, if any is."""
        return bool(cls.get_dataset_splits(name)) if split is None else file_of(name, split).exists()

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Delete all splits of a dataset; return True if there were any."""
        folder = _folder_of(name)
        with _writing():
            exists = cls.dataset_exists(name)
            shutil.rmtree(folder, ignore_errors=not folder.exists())
        return exists

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Delete one split, and the dataset with its last one; return True if the split existed."""
        path = file_of(name, split)
        with _writing():
            exists = path.exists()
            for file in (path, _metadata_file(path), path.with_suffix(".parquet")):
                file.unlink(missing_ok=True)
            if not cls.dataset_exists(name):
                shutil.rmtree(path.parent, ignore_errors=True)
        return exists


def _stored(rows: list[Task], path: Path, name: str, split: str) -> Dataset:
    dataset = Dataset.of_tasks(rows, name=name, split=split)
    dataset.stored_at = path
    return dataset


def datasets_folder() -> Path:
    """Return `$RLLM_HOME/datasets`, or `~/.rllm/datasets`."""
    return Path(os.environ.get("RLLM_HOME") or "~/.rllm").expanduser() / "datasets"


def _folder_of(name: str) -> Path:
    return datasets_folder() / _check_name(name, "dataset")


def file_of(name: str, split: str) -> Path:
    """Return the file of a split.

    Raises:
        ConfigError: if a name is not valid for a file, or would lead elsewhere.
    """
    return _folder_of(name) / (_check_name(split, "split") + SUFFIX)


def _metadata_file(path: Path) -> Path:
    return path.with_suffix(".metadata")


def _check_name(name: str, kind: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"{kind}={name!r} cannot be the name of a file: use letters and digits, after the first also any of "
            f"'_.+-', at most {_LONGEST_NAME} bytes"
        )
    return name


@contextmanager
def _writing() -> Iterator[None]:
    """Hold the lock of the datasets' folder. Other writers wait for it, readers do not."""
    folder = datasets_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"datasets cannot be stored in {str(folder)!r}: {error.strerror}; set RLLM_HOME to a writable folder"
        ) from error
    with held:
        lock(held, wait=True)
        yield


def _write_verl_parquet(rows: Sequence[Task], path: Path, *, data_source: str) -> None:
    """Write the file that verl's data loader reads: a placeholder as `prompt`, the row as `extra_info`.

    Parquet gives all rows the same fields; a missing one is null.
    """
    with needed("pyarrow", "data", f"writing {path.name}"):
        import pyarrow
        from pyarrow import parquet

    fields = list(dict.fromkeys(name for row in rows for name in row))
    columns: list[pyarrow.Array] = []
    for field in fields:
        try:
            columns.append(pyarrow.array([row.get(field) for row in rows]))
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            raise ConfigError(f"field {field!r} of {data_source!r} does not fit one Parquet column: {error}") from error
    table = pyarrow.table(
        {
            "prompt": [_VERL_PROMPT] * len(rows),
            "data_source": [str(row.get("data_source") or data_source) for row in rows],
            "extra_info": pyarrow.StructArray.from_arrays(columns, names=fields),
        }
    )
    with _writing(), new_file(path) as draft:
        try:
            parquet.write_table(table, draft)
        except pyarrow.ArrowException as error:
            raise ConfigError(f"{data_source!r} cannot be written as Parquet: {error}") from error
