"""Sources of tasks to rows: files, folders and ids of Hugging Face datasets, functions.

Errors name the file, and the line or row.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rllm.data.rows import Table, as_task, tasks_of
from rllm.errors import ConfigError, RLLMError, counted, needed
from rllm.registry import load_object
from rllm.types import JSONMapping, Task

if TYPE_CHECKING:
    import datasets

Source: TypeAlias = str | Path | Callable[[], Iterable[JSONMapping]]
Located: TypeAlias = tuple[str, object]
"""Place of a row, such as `"tasks.jsonl, line 3"`, and the row."""

_HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_SAVED = ("dataset_dict.json", "state.json")
"""Files by which a folder that `save_to_disk` wrote is recognized."""

_LONGEST_CELL = 2**31 - 1
_MANY_ROWS = 1_000_000
_MUCH_DATA, _MOST_PACKED = 1024 * 1024 * 1024, 100
"""Bytes in memory that any table may take, and a multiple of the file's size for larger ones: text seldom packs to a
tenth."""
_ROWS_AT_ONCE = 256


def rows_of(source: Source, *, split: str | None, subset: str | None) -> list[Task]:
    """Return the rows of a source; `Dataset.load` documents its forms and errors."""
    read: Callable[[], list[Task]]
    if not isinstance(source, str | Path):
        read = partial(_rows_of_function, source)
    else:
        text, path = str(source), Path(source).expanduser()
        _check_name(text)
        if text.startswith(_HUB_PREFIX) or path.is_dir():
            name = str(path) if path.is_dir() else text.removeprefix(_HUB_PREFIX)
            return read_hub(name, split=split, subset=subset)
        if path.suffix.lower() in READERS or path.exists():
            read = partial(read_file, path)
        elif _FUNCTION.fullmatch(text):
            read = partial(_rows_of_function, load_object(text, kind="function"))
        elif _HUB_ID.fullmatch(text):
            return read_hub(text, split=split, subset=subset)
        else:
            raise ConfigError(
                f"{text!r} does not exist: use a file of type {', '.join(READERS)}, a folder or id of "
                "Hugging Face datasets ('hf:org/name'), or a function of rows ('package.module:function'); "
                "registered datasets are read by DatasetRegistry.load_dataset"
            )
    if subset is not None:
        raise ConfigError(f"subset={subset!r}: only Hugging Face datasets have subsets, {name_of(source)!r} has none")
    return read()


def _check_name(text: str) -> None:
    """Refuse texts that look like a name of data and cannot be one."""
    if text in ("", _HUB_PREFIX):
        raise ConfigError(f"{text!r} names no data: name a file, such as tasks.jsonl, or a dataset")
    scheme, is_url, rest = text.partition("://")
    if is_url:
        url = f"{scheme}://..." if "@" in rest else text  # where a password may be
        if scheme in ("postgres", "postgresql"):
            raise ConfigError(
                f"{url!r} is a trace store: copy it to a file with `rllm store migrate`, and pass that to `rllm sft`"
            )
        raise ConfigError(f"{url!r} is a URL: download the file, and use its path")
    if ".py:" in text:
        raise ConfigError(f"{text!r}: name the module of a function, not its file: 'package.module:function'")


def name_of(source: Source) -> str:
    """Return a name for the rows of a source."""
    if not isinstance(source, str | Path):
        return str(getattr(source, "__name__", type(source).__name__))
    if _FUNCTION.fullmatch(str(source)):
        return str(source).rpartition(":")[2]
    path = Path(str(source).removeprefix(_HUB_PREFIX))
    return path.stem if path.suffix.lower() in READERS else path.name


def _rows_of_function(function: Source) -> list[Task]:
    """Return all rows of one call of a user's function, which may fail at any of them."""
    if not callable(function):
        raise ConfigError(f"{function!r}: use a path, or a function that returns rows; Dataset(rows) takes rows")
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


# Files


def read_file(path: Path) -> list[Task]:
    """Return the rows of a file whose suffix is in `READERS`.

    Raises:
        ConfigError: naming the file and the place in it.
        MissingDependencyError: if the file needs `pyarrow`.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{str(path)!r}: files of type {path.suffix!r} are not supported; use {', '.join(READERS)}")
    with reading(path):
        return [
            as_task(row, f"{where}: row {index} of dataset {path.stem!r}")
            for index, (where, row) in enumerate(reader(path))
        ]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report a file that is missing or cannot be read as `ConfigError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{str(path)!r}: no such file; check the path") from error
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield lines with their places. Only a newline ends one: strings may contain other separators."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where} cannot be read: {error}; save the file as UTF-8") from error


def _json_lines(path: Path) -> Iterator[Located]:
    remedy = "; a .jsonl file has one object a line, and a .json file a list of objects"
    for where, line in _lines(path):
        text = line.rstrip()
        if not text:
            continue
        try:
            value = _parse(text, where)
        except ConfigError as error:
            is_part = text.strip() in ("[", "{") or text.endswith(("},", "],"))
            raise ConfigError(f"{error}{remedy if is_part else ''}") from error
        if isinstance(value, list):
            raise ConfigError(f"{where} is a list{remedy}")
        yield where, value


def _json_list(path: Path) -> Iterator[Located]:
    rows = _parse("".join(line for _, line in _lines(path)), f"{path}")
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds a {type(rows).__name__}: use a list of objects")
    return ((f"{path}, item {index}", row) for index, row in enumerate(rows))


def _parse(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
        return value
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text.strip() else ""
        remedy = "; a file with one object a line is called .jsonl" if line and error.msg == "Extra data" else ""
        raise ConfigError(f"{where}{line}, column {error.colno} is not valid JSON: {error.msg}{remedy}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or too deep nesting
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _csv_rows(path: Path) -> Iterator[Located]:
    csv.field_size_limit(_LONGEST_CELL)  # the default refuses a task's documents
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        columns = next(reader, [])
        _check_columns(columns, f"{path}, line 1")
        for cells in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(columns):
                raise ConfigError(f"{where} has {len(cells)} cells, and the file {len(columns)} columns")
            yield where, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Located]:
    """Yield rows in plain Python types, maps as dicts, chats without the nulls that a table adds."""
    with needed("pyarrow", "data", f"reading {path.name}"):
        import pyarrow
        from pyarrow.parquet import ParquetFile

    row, taken, size = 0, 0, path.stat().st_size
    most_rows, most = max(_MANY_ROWS, size), max(_MUCH_DATA, _MOST_PACKED * size)
    try:
        with ParquetFile(path) as file:
            # Equal rows take no space in a file, but all of it in memory.
            if file.metadata.num_rows > most_rows:
                raise ConfigError(
                    f"{path} has {file.metadata.num_rows:,} rows, more than it has bytes: implausible for tasks"
                )
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                taken += batch.nbytes
                if taken > most:
                    raise ConfigError(f"{path} unpacks to more than {most:,} bytes, which is implausible for tasks")
                _check_columns(batch.schema.names, f"{path}")
                table = Table.of(batch)
                assert table is not None
                for values in table.tasks():
                    yield f"{path}, row {row}", values
                    row += 1
    except ConfigError:
        raise
    except (pyarrow.ArrowException, KeyError, ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read from row {row} on: {error}") from error


def _check_columns(names: list[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where} has several columns {twice[0]!r}: give each its own name")


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}


# Hugging Face datasets


def read_hub(source: str, *, split: str | None, subset: str | None = None, limit: int = 0) -> list[Task]:
    """Return the rows of a dataset on the hub or in a folder, in plain Python types; the first `limit`, or all for 0.

    Raises:
        ConfigError: if it cannot be loaded, or if it has several splits and none is named.
        MissingDependencyError: without `datasets`.
    """
    loaded = _load(source, split, subset)
    if isinstance(loaded, dict):
        name = next(iter(loaded)) if split is None and len(loaded) == 1 else split
        if name not in loaded:
            raise ConfigError(
                f"split={split!r}: {source!r} has the splits {', '.join(loaded)}; choose one of them (--split, "
                "--val-split)"
            )
        loaded = loaded[name]
    if limit:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return list(tasks_of(loaded, repr(source)))


def hub_files(source: str, names: Iterable[str]) -> list[Path]:
    """Return the local copies of files of a dataset on the hub.

    Raises:
        ConfigError: if they cannot be loaded.
        MissingDependencyError: without `datasets`.
    """
    with needed("datasets", "data", f"reading {source!r}"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    try:
        return [Path(hf_hub_download(source, name, repo_type="dataset")) for name in names]
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ConfigError(f"Hugging Face dataset {source!r} cannot be reached: {error}") from ConnectionError(error)
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"Hugging Face dataset {source!r} cannot be loaded: {error}") from error


def _load(source: str, split: str | None, subset: str | None) -> datasets.Dataset | datasets.DatasetDict:
    purpose = f"reading {source!r}" if Path(source).exists() else f"{source!r} is not a local file, and as a hub id"
    with needed("datasets", "data", purpose):
        import datasets

    try:
        if any((Path(source) / name).is_file() for name in _SAVED):
            loaded = datasets.load_from_disk(source, keep_in_memory=False)
            parts = loaded.values() if isinstance(loaded, dict) else [loaded]
            # They are mapped into memory, and not read yet.
            _check_files(source, (file["filename"] for part in parts for file in part.cache_files))
            return loaded
        named: Mapping[str, Iterable[object]] = datasets.load_dataset_builder(source, subset).config.data_files or {}
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


def _check_files(source: str, files: Iterable[str]) -> None:
    """Refuse a dataset whose description names files of this machine, or URLs, outside the dataset."""
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
