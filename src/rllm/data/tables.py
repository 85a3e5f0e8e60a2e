"""Tables of Arrow to rows: Parquet, Hugging Face `datasets`, pandas, pyarrow.

A table gives all structs of a column the same fields, and those that a struct did not have are null. In chats the policy
would read them: a call of `{"city": "Bern"}` has the arguments of all other tools, too. So nulls are left out of messages,
tools and calls, wherever they are in a row. A task's own fields keep theirs, because an agent that reads a field which is
null would fail where it is missing. What a column of JSON (`datasets.Json`) holds is as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from rllm.data.rows import CHAT_FIELDS, as_task
from rllm.types import Task

Path: TypeAlias = tuple[str, ...]
"""Names of the fields around a value, the outermost first; items of a list have the path of the list."""

_OF_CHATS = (*CHAT_FIELDS, "tool_calls", "arguments")
_NULLABLE = ("default", "const", "example", "examples")
"""Keywords of a JSON schema whose value may be null."""


@dataclass(frozen=True)
class Table:
    """Rows of a table in plain Python."""

    rows: Iterable[Any]
    json_paths: Set[Path] = frozenset()
    """Columns, and fields in them, whose values are JSON."""

    @classmethod
    def of(cls, data: Any) -> Table | None:
        """Return the table that this is, or `None` for anything else."""
        library = type(data).__module__.partition(".")[0]
        if library == "datasets" and hasattr(data, "features"):
            return cls(data.with_format(None), set(_json_of_features(data.features)))
        if library == "pyarrow" and hasattr(data, "to_pylist") and hasattr(data, "schema"):
            paths = set(_json_of_fields(data.schema))
            rows = data.to_pylist(maps_as_pydicts="strict")
            return cls([_json_read(row, paths) for row in rows] if paths else rows, paths)
        if library == "pandas" and hasattr(data, "columns"):
            return cls([_plain(row, of_pandas=True) for row in data.to_dict("records")])
        return None

    def tasks(self) -> Iterator[Any]:
        """Yield the rows without the nulls that the table has put into chats."""
        for row in self.rows:
            yield _row_without_nulls(row, self.json_paths)


def tasks_of(data: Iterable[Any], where: str) -> Iterator[Task]:
    """Yield the tasks that a user's program gives, as a table or as rows.

    Raises:
        ConfigError: naming the row that is not a mapping, or whose text is not JSON; the message ends with `where`.
    """
    table = Table.of(data)
    for index, row in enumerate(data if table is None else table.tasks()):
        yield given_task(row, f"row {index} of {where}", is_read=table is not None)


def given_task(row: Any, where: str, *, is_read: bool = False) -> Task:
    """Return a row of a user's program as a task.

    Rows that were taken out of a table still have its nulls. They are left out where a row shows them: all messages of a
    chat have the same fields, some null; or a tool has a null where its JSON schema has none.
    """
    if isinstance(row, Mapping):
        row = {field: _plain(value) if field in CHAT_FIELDS else value for field, value in row.items()}
        if not is_read and any(map(_shows_table, row.values())):
            row = _row_without_nulls(row, frozenset())
    return as_task(row, where)


def _json_of_features(kind: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all JSON in the features of Hugging Face datasets."""
    if type(kind).__name__ == "Json":
        yield path
    elif isinstance(kind, Mapping):
        for name, inner in kind.items():
            yield from _json_of_features(inner, (*path, name))
    elif isinstance(kind, list) and kind:
        yield from _json_of_features(kind[0], path)
    elif hasattr(kind, "feature"):
        yield from _json_of_features(kind.feature, path)


def _json_of_fields(fields: Iterable[Any], path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all JSON in these fields of pyarrow."""
    from pyarrow import types

    for field in fields:
        kind, here = field.type, (*path, field.name)
        while hasattr(kind, "value_type") and not types.is_dictionary(kind):
            kind = kind.value_type
        if getattr(kind, "extension_name", "") == "arrow.json":
            yield here
        elif types.is_struct(kind):
            yield from _json_of_fields(kind, here)


def _json_read(value: Any, paths: Set[Path], path: Path = ()) -> Any:
    """Return the value with JSON text at these paths read."""
    if isinstance(value, list):
        return [_json_read(item, paths, path) for item in value]
    if isinstance(value, str) and path in paths:
        return json.loads(value)
    if isinstance(value, dict):
        return {key: _json_read(item, paths, (*path, key)) for key, item in value.items()}
    return value


def _plain(value: Any, *, of_pandas: bool = False) -> Any:
    """Return the value with lists in place of NumPy's arrays and of tuples, and pandas' times as Python's.

    In a table of pandas, what is not there is `nan`, `NaT` or `NA`; here it is `None`.
    """
    if of_pandas and (type(value).__name__ in ("NaTType", "NAType") or (isinstance(value, float) and value != value)):
        return None
    for method in ("tolist", "to_pydatetime"):
        value = getattr(value, method)() if hasattr(value, method) else value
    if isinstance(value, Mapping):
        return {key: _plain(item, of_pandas=of_pandas) for key, item in value.items()}
    return [_plain(item, of_pandas=of_pandas) for item in value] if isinstance(value, list | tuple) else value


def _row_without_nulls(row: Mapping[str, Any], paths: Set[Path]) -> Task:
    """Return a row with all of its fields, which are columns, and without the nulls in its chats."""
    return {field: _field_without_nulls(value, (field,), paths) for field, value in row.items()}


def _field_without_nulls(value: Any, path: Path, paths: Set[Path]) -> Any:
    """Return a field of a task with the nulls left out of the messages, tools and calls in it."""
    if path in paths:
        return value
    if _is_chat(value) or path[-1] in _OF_CHATS:
        return _without_nulls(value, path, paths)
    if isinstance(value, dict):
        return {key: _field_without_nulls(item, (*path, key), paths) for key, item in value.items()}
    return [_field_without_nulls(item, path, paths) for item in value] if _has_structs(value) else value


def _without_nulls(value: Any, path: Path, paths: Set[Path]) -> Any:
    """Return the value without its nulls, but those of lists, which no table adds, and the `content` of messages."""
    if path in paths:
        return value
    if isinstance(value, dict):
        is_message = _is_message(value)
        return {
            key: _without_nulls(item, (*path, key), paths)
            for key, item in value.items()
            if item is not None or (is_message and key == "content")
        }
    return [_without_nulls(item, path, paths) for item in value] if _has_structs(value) else value


def _has_structs(value: Any) -> bool:
    """Return whether this is a list with objects in it, and not one of thousands of tokens."""
    if not isinstance(value, list):
        return False
    first = next((item for item in value if item is not None), None)
    return isinstance(first, dict | list)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _is_schema(value: dict[str, Any]) -> bool:
    return isinstance(value.get("properties"), dict) and value.get("type") == "object"


def _is_chat(value: Any) -> bool:
    """Return whether this is a message, a call, a tool or its JSON schema."""
    if not isinstance(value, dict):
        return False
    if _is_message(value) or _is_schema(value):
        return True
    function = value.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return True
    described = (value.get("parameters"), value.get("input_schema"), value.get("arguments"))
    return isinstance(value.get("name"), str) and any(isinstance(item, dict) for item in described)


def _shows_table(value: Any) -> bool:
    """Return whether there is a chat in a field of a row that can only have been in a table."""
    if isinstance(value, dict):
        return (_is_schema(value) and _has_impossible_null(value)) or any(map(_shows_table, value.values()))
    if not _has_structs(value):
        return False
    if len(value) > 1 and all(map(_is_message, value)) and len(set(map(frozenset, value))) == 1:
        return any(item[key] is None for item in value for key in item if key != "content")
    return any(map(_shows_table, value))


def _has_impossible_null(schema: dict[str, Any]) -> bool:
    properties = list(schema["properties"].values())
    inner = [item for item in properties if isinstance(item, dict)]
    return None in properties or any(
        item[key] is None for item in (schema, *inner) for key in item if key not in _NULLABLE
    )
