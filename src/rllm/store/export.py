"""Traces to files that other programs read: JSON lines, or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rllm._runtime.files import flush, place_of
from rllm.errors import ConfigError, MissingDependencyError
from rllm.store.codec import any_to_json, plain_text
from rllm.types import Trace

Format: TypeAlias = Literal["jsonl", "parquet"]

_ROWS = 1000
"""Rows to a group of a Parquet file: what is in memory at a time."""
_AS_JSON = (
    *("messages", "tools", "response", "sampling", "requested_sampling", "timings", "metadata"),
    "weight_updates",
)
"""Fields that a Parquet file keeps as JSON, because they have no fixed form."""


def export_traces(traces: Iterable[Trace], path: Path, kind: Format) -> int:
    """Write a file in one step: it is whole, or it is not there. Returns how many traces it holds.

    JSON lines have one object for each trace, with the fields of `Trace`. A Parquet file has the same as columns.

    Raises:
        ConfigError: if the file cannot be written.
        MissingDependencyError: if Parquet is asked for and `pyarrow` is not installed.
    """
    write: Callable[[Iterable[Trace], Path], int] = {"jsonl": _write_jsonl, "parquet": _write_parquet}[kind]
    try:
        place = place_of(path)
        new = place.with_name(f"{place.name}.new")
        try:
            count = write(traces, new)
            flush(new)
            new.replace(place)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror or error}): choose another path"
        ) from error
    return count


def _write_jsonl(traces: Iterable[Trace], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for trace in traces:
            file.write(any_to_json(trace.to_dict()) + b"\n")
            count += 1
    return count


def _write_parquet(traces: Iterable[Trace], path: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError.of("pyarrow", "data", "writing Parquet") from error
    text, ids = pa.string(), pa.list_(pa.int64())
    kinds = {
        "choice_index": pa.int32(),
        "prompt_ids": ids,
        "response_ids": ids,
        "logprobs": pa.list_(pa.float64()),
        "weight_version": pa.int64(),
        "started_at": pa.float64(),
    }
    schema = pa.schema([(name, kinds.get(name, text)) for name in Trace.__dataclass_fields__])
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(traces):
            writer.write_table(pa.Table.from_pylist([_row(trace) for trace in group], schema=schema))
            count += len(group)
    return count


def _row(trace: Trace) -> dict[str, Any]:
    row = {name: plain_text(value) if isinstance(value, str) else value for name, value in trace.to_dict().items()}
    return row | {name: any_to_json(row[name]).decode() for name in _AS_JSON}


def _groups(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    remaining = iter(traces)
    while group := list(islice(remaining, _ROWS)):
        yield group
