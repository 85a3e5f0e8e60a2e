"""Files of tasks to rows. Errors name the file, and the line or row."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from rllm.data.rows import Table, as_task
from rllm.errors import ConfigError, MissingDependencyError
from rllm.types import Task

Located: TypeAlias = tuple[str, Any]
"""Place of a row, such as `"tasks.jsonl, line 3"`, and the row."""

_LONGEST_CELL = 2**31 - 1
_MANY_ROWS = 1_000_000
_MUCH_DATA, _MOST_PACKED = 1024 * 1024 * 1024, 100
"""Bytes in memory that any table may take, and a multiple of the file's size for larger ones: text seldom packs to a
tenth."""
_ROWS_AT_ONCE = 256


def read_file(path: Path) -> list[Task]:
    """Return the rows of a file whose suffix is in `READERS`.

    Raises:
        ConfigError: naming the file and the place in it.
        MissingDependencyError: if the file needs `pyarrow`.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{str(path)!r}: files of type {path.suffix!r} are not supported; use {', '.join(READERS)}")
    try:
        return [
            as_task(row, f"{where}: row {index} of dataset {path.stem!r}")
            for index, (where, row) in enumerate(reader(path))
        ]
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
    return ((where, _object(line.rstrip(), where)) for where, line in _lines(path) if line.strip())


def _object(line: str, where: str) -> Any:
    """Return the value of a line. An error explains the format if the line looks like a part of a larger value."""
    remedy = "; a .jsonl file has one object a line, and a .json file a list of objects"
    try:
        value = _parse(line, where)
    except ConfigError as error:
        if line.strip() in ("[", "{") or line.endswith(("},", "],")):
            raise ConfigError(f"{error}{remedy}") from error
        raise
    if isinstance(value, list):
        raise ConfigError(f"{where} is a list{remedy}")
    return value


def _json_list(path: Path) -> Iterator[Located]:
    rows = _parse("".join(line for _, line in _lines(path)), f"{path}")
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds a {type(rows).__name__}: use a list of objects")
    return ((f"{path}, item {index}", row) for index, row in enumerate(rows))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
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
    return _arrow_rows(path, _parquet_batches)


def _ipc_rows(path: Path) -> Iterator[Located]:
    return _arrow_rows(path, _ipc_batches)


def _arrow_rows(path: Path, batches: Callable[[Path], Iterable[Any]]) -> Iterator[Located]:
    """Yield rows in plain Python types, maps as dicts, chats without the nulls that a table adds."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError.of("pyarrow", "data", f"reading {path.name}") from error

    row, taken = 0, 0
    most = max(_MUCH_DATA, _MOST_PACKED * path.stat().st_size)
    try:
        for batch in batches(path):
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


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        # Equal rows take no space in a file, but all of it in memory.
        if file.metadata.num_rows > max(_MANY_ROWS, path.stat().st_size):
            raise ConfigError(
                f"{path} has {file.metadata.num_rows:,} rows, more than it has bytes, which is implausible for tasks"
            )
        yield from file.iter_batches(_ROWS_AT_ONCE)


def _ipc_batches(path: Path) -> Iterator[Any]:
    """Yield batches of Arrow's IPC format, as a file or as the stream that Hugging Face datasets write."""
    from pyarrow import ipc

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = ipc.open_file(file)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from ipc.open_stream(file)


def _check_columns(names: list[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where} has several columns {twice[0]!r}: give each its own name")


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _ipc_rows,
}
