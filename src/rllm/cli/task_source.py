"""Tasks by whatever a person calls them: a file, a registered name, a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.data.dataset import Dataset
from rllm.data.files import READERS
from rllm.data.registry import PREPARED_BY, DatasetRegistry
from rllm.engine.signature import check_rows
from rllm.errors import ConfigError, concerning

_NAME = re.compile(r"[\w.+-]+")


def tasks_for(function: Callable[..., Any], source: str, split: str | None, *, option: str) -> Dataset:
    """The tasks that an agent function is called with; see `read_tasks`.

    Raises:
        ConfigError: see there; or if the function cannot be called with one of them.
    """
    data = read_tasks(source, split, option=option)
    with concerning(option):
        check_rows(function, data)
    return data


def read_tasks(source: str, split: str | None, *, option: str) -> Dataset:
    """The tasks of a registered dataset, or of anything else that `Dataset.load` reads; `option` is what they are given by.

    Raises:
        ConfigError: if there are none, or the split is not known.
        MissingDependencyError: see `Dataset.load`.
    """
    split_option = "--val-split" if option == "--val" else "--split"
    path = Path(source).expanduser()
    if split is not None and path.is_file():
        raise ConfigError(f"{split_option} {split}: {source!r} is a file, which has no splits")
    if path.exists() or path.suffix.lower() in READERS or not _NAME.fullmatch(source):
        with concerning(option):
            return Dataset.load(source, split=split)
    with concerning(option):
        splits = DatasetRegistry.get_dataset_splits(source)
    if not splits:
        made_by = f"; python -m {PREPARED_BY[source]} makes it" if source in PREPARED_BY else ""
        names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
        raise ConfigError(f"{option} {source}: it is no file and is not registered{made_by}; registered: {names}")
    chosen = splits[0] if split is None and len(splits) == 1 else split
    data = DatasetRegistry.load_dataset(source, chosen) if chosen in splits else None
    if data is None:
        raise ConfigError(
            f"{split_option} {split or 'is missing'}: dataset {source!r} has the splits {', '.join(splits)}"
        )
    return data
