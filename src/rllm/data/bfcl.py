"""Rows of the Berkeley Function-Calling Leaderboard to tasks.

Each of its categories is a file with one JSON object a line, and its accepted calls are in a file of the same name in
the folder `possible_answer`. Format: https://gorilla.cs.berkeley.edu/blogs/8_berkeley_function_calling_leaderboard.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rllm.data.sources import READERS
from rllm.errors import ConfigError
from rllm.types import JSONObject, Task

ANSWERS = "possible_answer"
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Type names that JSON Schema lacks, and their replacements."""
_ID = re.compile(r"(.*irrelevance|.*?)_\d")
_NOT_IN_NAMES = re.compile(r"[^\w-]")


def read_bfcl(path: Path) -> list[Task]:
    """Return the rows of a category, with accepted calls in `ground_truth`; those without need no call.

    Raises:
        ConfigError: if a file cannot be read, or rows that need calls have none.
    """
    rows, answers = _lines(path), path.parent / ANSWERS / path.name
    known = {row["id"]: row["ground_truth"] for row in _lines(answers)} if answers.is_file() else {}
    for row in rows:
        row.setdefault("ground_truth", known.get(row["id"], []))
        if not row["ground_truth"] and "irrelevance" not in row["id"]:
            raise ConfigError(f"{path}: row {row['id']!r} has no accepted calls in {answers}")
    return rows


def _lines(path: Path) -> list[Task]:
    try:
        found = [row for _, row in READERS[".jsonl"](path)]
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    if not all(isinstance(row, dict) and "id" in row for row in found):
        raise ConfigError(f"{path}: each line is an object with an id in files of this benchmark")
    return found  # type: ignore[return-value]


def bfcl_task(row: Task) -> Task:
    """Convert a row: its only turn becomes `messages`, its functions become `tools`.

    Names are made valid for APIs, `a.b` to `a_b`, here and in the accepted calls.
    """
    if len(row["question"]) != 1:
        raise ValueError(f"row {row['id']!r} has {len(row['question'])} turns: only categories of one turn are scored")
    found = _ID.match(row["id"])
    return {
        "id": row["id"],
        "category": found[1] if found else row["id"],
        "messages": row["question"][0],
        "tools": [{"type": "function", "function": _tool(function)} for function in row["function"]],
        "ground_truth": [{_name(name): accepted for name, accepted in call.items()} for call in row["ground_truth"]],
    }


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _tool(function: JSONObject) -> JSONObject:
    return {
        "name": _name(function["name"]),
        "description": function.get("description", ""),
        "parameters": _schema(function["parameters"]),
    }


def _schema(schema: JSONObject) -> JSONObject:
    """Return a schema, and all those in it, with the types of JSON Schema."""
    changed = dict(schema)
    if isinstance(schema.get("type"), str):
        changed["type"] = _TYPES.get(schema["type"], schema["type"])
    if isinstance(schema.get("properties"), Mapping):
        changed["properties"] = {name: _schema(item) for name, item in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        changed["items"] = _schema(schema["items"])
    return changed
