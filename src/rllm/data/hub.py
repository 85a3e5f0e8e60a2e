"""Hugging Face datasets, by id or by folder, to rows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rllm.data.tables import tasks_of
from rllm.errors import ConfigError, MissingDependencyError
from rllm.types import Task

_SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` leaves in a folder."""


def read_hub(source: str, *, split: str | None, subset: str | None = None, limit: int = 0) -> list[Task]:
    """Return the rows of a dataset on the hub or in a folder, in plain Python types; the first `limit`, or all for 0.

    Raises:
        ConfigError: if it cannot be had, or if it has several splits and none is named.
        MissingDependencyError: without `datasets`.
    """
    loaded = _one_split(_load(source, split, subset), source, split)
    if limit:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return list(tasks_of(loaded, repr(source)))


def _load(source: str, split: str | None, subset: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        purpose = f"reading {source!r}" if Path(source).exists() else f"{source!r} is no file here, and as a hub id"
        raise MissingDependencyError.of("datasets", "data", purpose) from error

    try:
        if any((Path(source) / name).is_file() for name in _SAVED):
            loaded = datasets.load_from_disk(source, keep_in_memory=False)
            _check_files(source, _saved_files(loaded))  # which are mapped into memory, and not read yet
            return loaded
        named = datasets.load_dataset_builder(source, subset).config.data_files or {}
        _check_files(source, (str(file) for files in named.values() for file in files))
        return datasets.load_dataset(source, subset, split=split)
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError(
            f"Hugging Face dataset {source!r} cannot be reached: {error}. Connect to the network (without HF_HUB_OFFLINE) "
            "and load it once, which keeps it in the cache; or name a local file or folder"
        ) from error
    except Exception as error:  # each of its readers has its own kinds
        raise ConfigError(
            f"Hugging Face dataset {source!r} cannot be loaded: {error}. Check the name, "
            f"subset={subset!r} and split={split!r}, and for a gated one your login"
        ) from error


def _saved_files(loaded: Any) -> list[str]:
    parts = loaded.values() if isinstance(loaded, dict) else [loaded]
    return [file["filename"] for part in parts for file in part.cache_files]


def _check_files(source: str, files: Iterable[str]) -> None:
    """Refuse a dataset whose description names files of this machine, or addresses, outside the dataset.

    Raises:
        ConfigError: naming one of them.
    """
    folder = Path(os.path.realpath(source))
    if folder.parent.name == "snapshots":  # of the hub's cache, which links to its blobs
        folder = folder.parent.parent
    own = (f"hf://datasets/{source}@", f"hf://datasets/{source}/")
    for file in files:
        is_own = Path(os.path.realpath(file)).is_relative_to(folder) if folder.is_dir() else file.startswith(own)
        if not is_own:
            raise ConfigError(
                f"dataset={source!r}: its description names {file!r}, which is not part of it: if you trust that, name the "
                "file itself"
            )


def _one_split(loaded: Any, source: str, split: str | None) -> Any:
    """The split of this name; without a name, the only one."""
    if not isinstance(loaded, dict):
        return loaded
    name = next(iter(loaded)) if split is None and len(loaded) == 1 else split
    if name not in loaded:
        raise ConfigError(
            f"split={split!r}: {source!r} has the splits {', '.join(loaded)}; choose one of them (--split, --val-split)"
        )
    return loaded[name]
