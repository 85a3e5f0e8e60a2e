"""Datasets by name and split, kept for every program of this user."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rllm.data.dataset import Dataset
from rllm.data.files import read_file
from rllm.data.rows import json_value
from rllm.data.storage import SUFFIX, datasets_folder, file_of, folder_of, replacing, writing
from rllm.errors import ConfigError
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
"""The programs that register known datasets: `python -m rllm.data.prepare_countdown`."""


class DatasetRegistry:
    """Keeps a split as `datasets/<name>/<split>.jsonl` under `$RLLM_HOME`, or else `~/.rllm`.

    Processes may register at the same time: each split is afterwards what one of them gave. A name is letters, digits
    and any of `_.+-`; any other raises `ConfigError`, here as in every method.
    """

    @classmethod
    def register_dataset(
        cls, name: str, data: Iterable[Mapping[str, Any]], split: str = "default", **metadata: Any
    ) -> Dataset:
        """Keep these rows, in place of what the split had, and notes about them.

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
            _write_lines(_notes_of(path), [notes])
            _write_lines(path, rows)
        return _stored(rows, path, name, split)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        """The rows of a split; `None`, and a warning that says what there is, if it is not registered."""
        path = file_of(name, split)
        if not path.exists():
            logger.warning("%s", _what_there_is(name, split))
            return None
        return _stored(read_file(path), path, name, split)

    @classmethod
    def get_metadata(cls, name: str, split: str = "default") -> dict[str, Any]:
        """The notes that a split was registered with; none if it is not registered."""
        path = _notes_of(file_of(name, split))
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        """All registered datasets, in order of their names."""
        files = datasets_folder().glob(f"*/[!.]*{SUFFIX}")
        return sorted({file.parent.name for file in files})

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """The splits of a dataset, in order of their names."""
        return sorted(file.name.removesuffix(SUFFIX) for file in folder_of(name).glob(f"[!.]*{SUFFIX}"))

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        """Whether the split is registered; without one, whether any is."""
        return bool(cls.get_dataset_splits(name)) if split is None else file_of(name, split).exists()

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Forget all splits of a dataset; whether there were any."""
        folder = folder_of(name)
        with writing():
            exists = cls.dataset_exists(name)
            if folder.exists():
                shutil.rmtree(folder)
        return exists

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Forget one split; whether it was there. The dataset goes with its last split."""
        path = file_of(name, split)
        with writing():
            exists = path.exists()
            for file in (path, _notes_of(path), path.with_suffix(".parquet")):
                file.unlink(missing_ok=True)
            if not cls.dataset_exists(name):
                shutil.rmtree(path.parent, ignore_errors=True)
        return exists


def _stored(rows: list[Task], path: Path, name: str, split: str) -> Dataset:
    dataset = Dataset.of_tasks(rows, name=name, split=split)
    dataset.stored_at = path
    return dataset


def _notes_of(path: Path) -> Path:
    return path.with_suffix(".metadata")


def _write_lines(path: Path, values: Iterable[Any]) -> None:
    """One JSON value a line, in ASCII, which keeps every string, also those that are not valid Unicode."""
    with replacing(path) as draft, draft.open("w", encoding="ascii") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


def _what_there_is(name: str, split: str) -> str:
    splits = DatasetRegistry.get_dataset_splits(name)
    if splits:
        return f"dataset {name!r} has no split {split!r}; it has {', '.join(splits)}"
    names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
    remedy = f"; python -m {PREPARED_BY[name]} makes it" if name in PREPARED_BY else ""
    return f"dataset {name!r} is not registered{remedy}; registered: {names}"
