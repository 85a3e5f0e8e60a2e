"""Sources of tasks to rows: files, folders and ids of Hugging Face datasets, functions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rllm.data.files import READERS, read_file
from rllm.data.rows import tasks_of
from rllm.errors import ConfigError, MissingDependencyError, RLLMError, counted
from rllm.registry import load_object
from rllm.types import Task

Source: TypeAlias = str | Path | Callable[[], Iterable[Mapping[str, Any]]]

_HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_SAVED = ("dataset_dict.json", "state.json")
"""Files by which a folder that `save_to_disk` wrote is recognised."""


def rows_of(source: Source, *, split: str | None, subset: str | None) -> list[Task]:
    """Return the rows of a source; `Dataset.load` documents its forms and errors."""
    if not isinstance(source, str | Path):
        _has_no_subsets(source, subset)
        return _rows_of_function(source)
    text, path = str(source), Path(source).expanduser()
    _check_name(text)
    if text.startswith(_HUB_PREFIX):
        return read_hub(text.removeprefix(_HUB_PREFIX), split=split, subset=subset)
    if path.is_dir():
        return read_hub(str(path), split=split, subset=subset)
    if path.suffix.lower() in READERS or path.exists():
        _has_no_subsets(text, subset)
        return read_file(path)
    if _FUNCTION.fullmatch(text):
        _has_no_subsets(text, subset)
        return _rows_of_function(load_object(text, kind="function"))
    if _HUB_ID.fullmatch(text):
        return read_hub(text, split=split, subset=subset)
    raise ConfigError(
        f"{text!r} does not exist: use a file of type {', '.join(READERS)}, a folder or id of "
        "Hugging Face datasets ('hf:org/name'), or a function of rows ('package.module:function'); "
        "registered datasets are read by DatasetRegistry.load_dataset"
    )


def _check_name(text: str) -> None:
    """Refuse texts that look like a name of data and cannot be one."""
    if text in ("", _HUB_PREFIX):
        raise ConfigError(f"{text!r} names no data: name a file, such as tasks.jsonl, or a dataset")
    scheme, is_address, rest = text.partition("://")
    if is_address:
        address = f"{scheme}://..." if "@" in rest else text  # where a password may be
        if scheme in ("postgres", "postgresql"):
            raise ConfigError(
                f"{address!r} is a trace store: copy it into a file with rllm store migrate, and name that to rllm sft"
            )
        raise ConfigError(f"{address!r} is an address: download the file, and name it here")
    module, dot_py, function = text.partition(".py:")
    if dot_py:
        module = Path(module).name
        raise ConfigError(f"{text!r}: a function of rows is named by its module, as in '{module}:{function}'")


def name_of(source: Source) -> str:
    """Return a name for the rows of a source."""
    if not isinstance(source, str | Path):
        return str(getattr(source, "__name__", type(source).__name__))
    if _FUNCTION.fullmatch(str(source)):
        return str(source).rpartition(":")[2]
    path = Path(str(source).removeprefix(_HUB_PREFIX))
    return path.stem if path.suffix.lower() in READERS else path.name


def _rows_of_function(function: Any) -> list[Task]:
    """Return all rows of one call of a user's function, which may fail at any of them."""
    if not callable(function):
        raise ConfigError(f"{function!r}: use a path, or a function that gives rows; rows go to Dataset(rows)")
    where = f"data function {name_of(function)!r}"
    rows: list[Task] = []
    try:
        for row in tasks_of(function(), where):
            rows.append(row)
    except RLLMError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} raised {type(error).__name__} after {counted(len(rows), 'row')}: {error}"
        ) from error
    return rows


def _has_no_subsets(source: Any, subset: str | None) -> None:
    if subset is not None:
        raise ConfigError(f"subset={subset!r}: only Hugging Face datasets have subsets, {name_of(source)!r} has none")


def read_hub(source: str, *, split: str | None, subset: str | None = None, limit: int = 0) -> list[Task]:
    """Return the rows of a dataset on the hub or in a folder, in plain Python types; the first `limit`, or all for 0.

    Raises:
        ConfigError: if it cannot be loaded, or if it has several splits and none is named.
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
        purpose = f"reading {source!r}" if Path(source).exists() else f"{source!r} is not a local file, and as a hub id"
        raise MissingDependencyError.of("datasets", "data", purpose) from error

    try:
        if any((Path(source) / name).is_file() for name in _SAVED):
            loaded = datasets.load_from_disk(source, keep_in_memory=False)
            _check_files(source, _saved_files(loaded))  # they are mapped into memory, and not read yet
            return loaded
        named = datasets.load_dataset_builder(source, subset).config.data_files or {}
        _check_files(source, (str(file) for files in named.values() for file in files))
        return datasets.load_dataset(source, subset, split=split)
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError(
            f"Hugging Face dataset {source!r} cannot be reached: {error}. Connect to the network (without "
            "HF_HUB_OFFLINE) and load it once, which keeps it in the cache; or name a local file or folder"
        ) from error
    except Exception as error:  # each reader of the library raises its own kinds
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
    if folder.parent.name == "snapshots":  # the hub's cache, which links to its blobs
        folder = folder.parent.parent
    own = (f"hf://datasets/{source}@", f"hf://datasets/{source}/")
    for file in files:
        is_own = Path(os.path.realpath(file)).is_relative_to(folder) if folder.is_dir() else file.startswith(own)
        if not is_own:
            raise ConfigError(
                f"dataset={source!r}: its description names {file!r}, which is not part of it: if you trust it, "
                "name the file itself"
            )


def _one_split(loaded: Any, source: str, split: str | None) -> Any:
    """Return the split of this name; without a name, the only one."""
    if not isinstance(loaded, dict):
        return loaded
    name = next(iter(loaded)) if split is None and len(loaded) == 1 else split
    if name not in loaded:
        raise ConfigError(
            f"split={split!r}: {source!r} has the splits {', '.join(loaded)}; choose one of them (--split, --val-split)"
        )
    return loaded[name]
