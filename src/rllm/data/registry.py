"""Datasets by name and split, kept on disk for every program of this user."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllm._runtime.files import lock, sync
from rllm.data.dataset import Dataset
from rllm.data.files import read_file
from rllm.data.rows import json_value
from rllm.errors import ConfigError, MissingDependencyError
from rllm.types import Task

logger = logging.getLogger(__name__)

PREPARED_BY = {
    "arithmetic": "rllm.data.prepare_arithmetic",
    "countdown": "rllm.data.prepare_countdown",
    "grid_world": "rllm.data.prepare_grid_world",
    "gsm8k": "rllm.data.prepare_gsm8k",
    "hendrycks_math": "rllm.data.prepare_math",
    "hotpotqa": "rllm.data.prepare_hotpotqa",
    "math500": "rllm.data.prepare_math",
}
"""Programs that register known datasets: `python -m rllm.data.prepare_countdown`."""
SUFFIX = ".jsonl"

_NAME = re.compile(r"\w[\w.+-]*")
_LONGEST_NAME = 100
PLACEHOLDER = [{"role": "user", "content": "The agent writes the prompt."}]
"""verl needs a prompt in each row; the agent makes its own from the task."""


class DatasetRegistry:
    """Keeps each split as `datasets/<name>/<split>.jsonl` under `$RLLM_HOME`, or else `~/.rllm`.

    Processes may register a split at the same time; it then has the rows of one of them. Names consist of letters,
    digits and any of `_.+-`; every method raises `ConfigError` for other names.
    """

    @classmethod
    def register_dataset(
        cls, name: str, data: Iterable[Mapping[str, Any]], split: str = "default", **metadata: Any
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
        with writing():
            path.parent.mkdir(exist_ok=True)
            _write_lines(_metadata_file(path), [notes])
            _write_lines(path, rows)
        return _stored(rows, path, name, split)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        """Return the rows of a split; `None` if it is not registered, with a warning that lists the registered ones."""
        path = file_of(name, split)
        if not path.exists():
            logger.warning("%s", _not_registered(name, split))
            return None
        return _stored(read_file(path), path, name, split)

    @classmethod
    def get_metadata(cls, name: str, split: str = "default") -> dict[str, Any]:
        """Return the metadata of a split; empty if it is not registered."""
        path = _metadata_file(file_of(name, split))
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        """Return the names of all registered datasets, sorted."""
        files = datasets_folder().glob(f"*/[!.]*{SUFFIX}")
        return sorted({file.parent.name for file in files})

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """Return the names of a dataset's splits, sorted."""
        return sorted(file.name.removesuffix(SUFFIX) for file in folder_of(name).glob(f"[!.]*{SUFFIX}"))

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        """Return True if the split is registered; without a split, if any is."""
        return bool(cls.get_dataset_splits(name)) if split is None else file_of(name, split).exists()

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Delete all splits of a dataset; return True if there were any."""
        folder = folder_of(name)
        with writing():
            exists = cls.dataset_exists(name)
            if folder.exists():
                shutil.rmtree(folder)
        return exists

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Delete one split, and the dataset with its last one; return True if the split existed."""
        path = file_of(name, split)
        with writing():
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


def _metadata_file(path: Path) -> Path:
    return path.with_suffix(".metadata")


def _write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write one JSON value on each line, in ASCII, which can hold strings that are not valid Unicode."""
    with replacing(path) as draft, draft.open("w", encoding="ascii") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


def _not_registered(name: str, split: str) -> str:
    splits = DatasetRegistry.get_dataset_splits(name)
    if splits:
        return f"dataset {name!r} has no split {split!r}; it has {', '.join(splits)}"
    names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
    remedy = f"; python -m {PREPARED_BY[name]} makes it" if name in PREPARED_BY else ""
    return f"dataset {name!r} is not registered{remedy}; registered: {names}"


def datasets_folder() -> Path:
    """Return `$RLLM_HOME/datasets`, or `~/.rllm/datasets`."""
    return Path(os.environ.get("RLLM_HOME") or "~/.rllm").expanduser() / "datasets"


def folder_of(name: str) -> Path:
    """Return the folder of a dataset, which has a file for each split.

    Raises:
        ConfigError: if the name cannot be that of a folder, or would lead elsewhere.
    """
    return datasets_folder() / _check_name(name, "dataset")


def file_of(name: str, split: str) -> Path:
    """Return the file of a split.

    Raises:
        ConfigError: if the name cannot be that of a file, or would lead elsewhere.
    """
    return folder_of(name) / (_check_name(split, "split") + SUFFIX)


def _check_name(name: str, kind: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"{kind}={name!r} cannot be the name of a file: use letters and digits, after the first also any of "
            f"'_.+-', at most {_LONGEST_NAME} bytes"
        )
    return name


@contextmanager
def writing() -> Iterator[None]:
    """Hold the lock of the datasets' folder. Other writers wait for it, readers do not.

    Raises:
        ConfigError: if it cannot be written.
    """
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file then replaces `path` in one step; after an error, nothing changes."""
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        with draft.open("rb+") as file:
            sync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_verl_parquet(rows: Sequence[Task], path: Path, *, data_source: str) -> None:
    """Write the Parquet file that verl's data loader reads.

    `prompt` is a placeholder, `data_source` is the row's own or else this one, and `extra_info` is the row. Parquet
    gives all rows the same fields; a missing one is null.

    Raises:
        ConfigError: if a field has values of several types, or of one that parquet cannot hold.
        MissingDependencyError: without `pyarrow`.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError.of("pyarrow", "data", f"writing {path.name}") from error

    fields = list(dict.fromkeys(name for row in rows for name in row))
    columns: list[Any] = []
    for field in fields:
        try:
            columns.append(pyarrow.array([row.get(field) for row in rows]))
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            raise ConfigError(f"field {field!r} of {data_source!r} does not fit one parquet column: {error}") from error
    table = pyarrow.table(
        {
            "prompt": [PLACEHOLDER] * len(rows),
            "data_source": [str(row.get("data_source") or data_source) for row in rows],
            "extra_info": pyarrow.StructArray.from_arrays(columns, names=fields),
        }
    )
    with replacing(path) as draft:
        try:
            parquet.write_table(table, draft)
        except pyarrow.ArrowException as error:
            raise ConfigError(f"{data_source!r} cannot be written as parquet: {error}") from error
