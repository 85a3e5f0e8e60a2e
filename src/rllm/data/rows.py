"""Rows of tasks: from Python objects and Arrow tables to plain dicts, and to the types of JSON.

A table (Parquet, Hugging Face `datasets`, pandas, pyarrow) gives all structs of a column the same fields; fields that a
struct did not have are null. In chats the policy would read them: a call of `{"city": "Bern"}` would have the arguments
of all other tools, too. So nulls are left out of messages, tools and calls, wherever they are in a row. A task's own
fields keep theirs, because an agent that reads a null field would fail if it were missing. The content of a JSON column
(`datasets.Json`) is kept as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rllm.errors import ConfigError, shown
from rllm.types import JSONMapping, JSONObject, Message, Task

if TYPE_CHECKING:
    import pyarrow

_ATOMS = (type(None), bool, int, float, str)
CHAT_FIELDS = ("messages", "tools")
"""Fields of a row that contain a chat."""
_JSON_TEXT = re.compile(r'\s*(?:\[\s*(?:[{\]"]|$)|\{\s*["}]|null\s*$)')
"""Beginning of a text that was meant as JSON: a task may have other texts in fields of these names."""
FieldPath: TypeAlias = tuple[str, ...]
"""Names of the fields around a value, the outermost first; items of a list have the path of the list."""

_OF_CHATS = (*CHAT_FIELDS, "tool_calls", "arguments")
_NULLABLE = ("default", "const", "example", "examples")
"""Keywords of a JSON schema whose value may be null."""


@dataclass(frozen=True)
class Table:
    """Rows of a table, as plain Python values."""

    rows: Iterable[JSONMapping]
    json_paths: Set[FieldPath] = frozenset()
    """Columns, and fields in them, whose values are JSON."""
    is_json_text: bool = False
    """True if these values are text that is not parsed yet."""

    @classmethod
    def of(cls, data: Any) -> Table | None:
        """Return a table of a known library as a `Table`; `None` for anything else."""
        library = type(data).__module__.partition(".")[0]
        if library == "datasets" and hasattr(data, "features"):
            schema = data.features.arrow_schema if data.features else ()
            return cls(data.with_format(None), set(_json_of_fields(schema)))
        if library == "pyarrow" and hasattr(data, "to_pylist") and hasattr(data, "schema"):
            rows = data.to_pylist(maps_as_pydicts="strict")
            return cls(rows, set(_json_of_fields(data.schema)), is_json_text=True)
        if library == "pandas" and hasattr(data, "columns"):
            return cls(
                [
                    {name: plain_value(value, of_pandas=True) for name, value in row.items()}
                    for row in data.to_dict("records")
                ]
            )
        return None

    def tasks(self) -> Iterator[Task]:
        """Yield the rows without the nulls that the table added to chats."""
        return (self.without_nulls(row) for row in self.rows)

    def without_nulls(self, row: JSONMapping) -> Task:
        """Return a row with all of its fields, without the nulls in its chats."""
        return {field: self._clean(value, (field,)) for field, value in row.items()}

    def _clean(self, value: object, path: FieldPath, in_chat: bool = False) -> object:
        """Return a value without the nulls of chats, except in lists, where tables add none, and message contents."""
        is_json = path in self.json_paths
        if is_json and not isinstance(value, list):
            return json.loads(value) if self.is_json_text and isinstance(value, str) else value
        in_chat = in_chat or path[-1] in _OF_CHATS or _is_chat(value)
        if isinstance(value, dict):
            is_message = _is_message(value)
            return {
                key: self._clean(item, (*path, key), in_chat)
                for key, item in value.items()
                if item is not None or not in_chat or (is_message and key == "content")
            }
        if isinstance(value, list) and (is_json or _has_structs(value)):
            return [self._clean(item, path, in_chat) for item in value]
        return value


def tasks_of(data: Iterable[object], where: str) -> Iterator[Task]:
    """Yield the tasks of a table or of rows that a user's program provides.

    Raises:
        ConfigError: naming the row that is not a mapping, or whose text is not JSON; the message ends with `where`.
    """
    table = Table.of(data)
    for index, row in enumerate(data if table is None else table.tasks()):
        yield given_task(row, f"row {index} of {where}", is_read=table is not None)


def given_task(row: object, where: str, *, is_read: bool = False) -> Task:
    """Return a row of a user's program as a task.

    Rows taken from a table still have its nulls. They are left out if the row shows that it came from a table: all
    messages of a chat have the same fields, some of them null; or a tool has a null that its JSON schema cannot have.
    """
    if isinstance(row, Mapping):
        row = {field: plain_value(value) if field in CHAT_FIELDS else value for field, value in row.items()}
        if not is_read and any(map(_shows_table, row.values())):
            row = Table(()).without_nulls(row)
    return as_task(row, where)


def _json_of_fields(fields: Iterable[pyarrow.Field], path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the paths of all JSON values in fields of pyarrow."""
    from pyarrow import types

    for field in fields:
        kind, here = field.type, (*path, field.name)
        while hasattr(kind, "value_type") and not types.is_dictionary(kind):
            kind = kind.value_type
        if getattr(kind, "extension_name", "") == "arrow.json":
            yield here
        elif types.is_struct(kind):
            yield from _json_of_fields(kind, here)


def plain_value(value: object, *, of_pandas: bool = False) -> Any:
    """Return a value with lists instead of arrays and tuples, and with Python's times instead of pandas' times.

    Missing values of pandas (`nan`, `NaT`, `NA`) become `None`.
    """
    if of_pandas and (type(value).__name__ in ("NaTType", "NAType") or (isinstance(value, float) and value != value)):
        return None
    for method in ("tolist", "to_pydatetime"):
        value = getattr(value, method)() if hasattr(value, method) else value
    if isinstance(value, Mapping):
        return {key: plain_value(item, of_pandas=of_pandas) for key, item in value.items()}
    return [plain_value(item, of_pandas=of_pandas) for item in value] if isinstance(value, list | tuple) else value


def _has_structs(value: object) -> TypeGuard[list[object]]:
    """Return True for a list of objects or lists, as opposed to one of thousands of tokens."""
    if not isinstance(value, list):
        return False
    first = next((item for item in value if item is not None), None)
    return isinstance(first, dict | list)


def _is_message(value: object) -> TypeGuard[Message]:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _is_schema(value: JSONObject) -> bool:
    return isinstance(value.get("properties"), dict) and value.get("type") == "object"


def _is_chat(value: object) -> bool:
    """Return True for a message, a call, a tool or its JSON schema."""
    if not isinstance(value, dict):
        return False
    if _is_message(value) or _is_schema(value):
        return True
    function = value.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return True
    described = (value.get("parameters"), value.get("input_schema"), value.get("arguments"))
    return isinstance(value.get("name"), str) and any(isinstance(item, dict) for item in described)


def _shows_table(value: object) -> bool:
    """Return True if a field of a row contains a chat that must come from a table."""
    if isinstance(value, dict):
        return (_is_schema(value) and _has_impossible_null(value)) or any(map(_shows_table, value.values()))
    if not _has_structs(value):
        return False
    messages = [item for item in value if _is_message(item)]
    if len(messages) == len(value) > 1 and len({frozenset(message) for message in messages}) == 1:
        return any(message[key] is None for message in messages for key in message if key != "content")
    return any(map(_shows_table, value))


def _has_impossible_null(schema: JSONObject) -> bool:
    properties = list(schema["properties"].values())
    inner = [item for item in properties if isinstance(item, dict)]
    return None in properties or any(
        item[key] is None for item in (schema, *inner) for key in item if key not in _NULLABLE
    )


def as_task(row: object, where: str) -> Task:
    """Return a copy of the row as a dict, with chats parsed that are given as JSON text.

    Raises:
        ConfigError: if it is not a mapping, or if such text is not JSON; the message begins with `where`.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {shown(row)}: use an object with a field for each argument")
    task = dict(row)
    for field in CHAT_FIELDS:
        if (value := task.get(field)) is None:
            continue
        items = _read(value, f"{where}: {field}", list) if isinstance(value, str) else value
        if isinstance(items, list):
            items = [_read_item(item, f"{where}: {field}[{place}]") for place, item in enumerate(items)]
        task[field] = items
    return task


def _read_item(item: object, where: str) -> object:
    """Return a message or a tool. Arguments of a call stay text, as in OpenAI's format."""
    item = _read(item, where, dict) if isinstance(item, str) else item
    if not isinstance(item, dict):
        return item
    texts = {
        field: kind
        for field, kind in (("tool_calls", list), ("function", dict), ("parameters", dict), ("input_schema", dict))
        if isinstance(item.get(field), str)
    }
    item = item | {field: _read(item[field], f"{where}.{field}", kind) for field, kind in texts.items()}
    if isinstance(item.get("tool_calls"), list):
        calls = enumerate(item["tool_calls"])
        item = item | {"tool_calls": [_read_item(call, f"{where}.tool_calls[{place}]") for place, call in calls]}
    if isinstance(item.get("function"), dict):
        item = item | {"function": _read_item(item["function"], f"{where}.function")}
    return item


def _read(text: str, where: str, kind: type) -> object:
    """Return the list or object of a JSON text, or the text itself if it was not meant as JSON."""
    if not _JSON_TEXT.match(text):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}={shown(text)} is not valid JSON: {error}; use valid JSON, or a list or object"
        ) from error
    if not isinstance(value, kind | None):
        held, wanted = ("an object", "a list") if kind is list else ("a list", "an object")
        raise ConfigError(f"{where}={shown(text)} is the JSON text of {held}: use {wanted}")
    return value


def json_value(value: object, where: str) -> Any:
    """Return a value in the types of JSON: numbers and arrays of NumPy as numbers and lists, tuples as lists.

    Raises:
        ConfigError: if JSON cannot hold it; the message begins with `where`, extended by the path inside the value.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping):
        unnamed = next((key for key in value if type(key) is not str), None)
        if unnamed is not None:
            raise ConfigError(f"{where} has the key {unnamed!r}: JSON has only text for keys, so use {str(unnamed)!r}")
        return {key: json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), where)
    raise ConfigError(
        f"{where} is {shown(value)}, and JSON has no type for {type(value).__name__!r}: "
        "make it text, a number, a list or an object"
    )
