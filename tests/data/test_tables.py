"""Rows read from a table equal those written, in each library's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from rllm.data import Dataset, DatasetRegistry
from rllm.errors import ConfigError
from rllm.rewards.reward_types import texts_of
from rllm.store.codec import readable_json
from rllm.trainer.sampled_rows import rows_of_items

pytestmark = pytest.mark.usefixtures("hub_cache")


def tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*calls: dict[str, Any], answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Please"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        *({"role": "tool", "content": "done", "tool_call_id": one["id"]} for one in calls),
        {"role": "assistant", "content": answer, "reasoning_content": "So be it."},
    ]


WEATHER = tool("weather", {"city": {"type": "string", "enum": ["Bern", "Rome"]}}, required=["city"])
ADD = tool("add", {"a": {"type": "integer", "description": "One"}, "b": {"type": "integer"}})
NOTHING = tool("nothing", {})
PLACE = tool("place", {"at": {"type": "object", "properties": {"x": {"type": "number"}}}})
CHATS: list[dict[str, Any]] = [
    {"messages": chat(call("weather", city="Bern"), answer="Rain"), "tools": [WEATHER, ADD], "id": 1},
    {"messages": chat(call("add", a=1, b=2), call("nothing"), answer="3"), "tools": [ADD, NOTHING], "id": 2},
    {"messages": chat(call("place", at={"x": 0.5}), answer="There"), "tools": [PLACE, WEATHER], "id": 3},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "tools": [], "id": 4},
]
AGENT_TASKS: list[dict[str, Any]] = [
    {
        "prompt": chat(call("add", a=1, b=2), answer="3")[:1],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"expected": call("add", a=1, b=2)["function"], "tools": [ADD], "history": CHATS[0]["messages"]},
    },
    {
        "prompt": chat(answer="Rain")[:1],
        "reward_model": {"style": "rule", "ground_truth": "Rain"},
        "extra_info": {"expected": call("weather", city="Bern")["function"], "tools": [NOTHING], "history": []},
    },
]


def hub(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(rows)


def file(rows: list[dict[str, Any]], path: Path) -> Path:
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, path)
    return path


def saved(rows: list[dict[str, Any]], folder: Path) -> Path:
    hub(rows).save_to_disk(folder)
    return folder


def files_of_hub(rows: list[dict[str, Any]], folder: Path) -> Path:
    folder.mkdir()
    hub(rows).to_parquet(folder / "train.parquet")
    return folder


def loader(rows: list[dict[str, Any]]) -> Any:
    def tasks() -> Iterator[dict[str, Any]]:
        for row in hub(rows):
            yield {field: row[field] for field in rows[0]}

    return tasks


SOURCES: dict[str, Any] = {
    "parquet": lambda rows, folder: Dataset.load(file(rows, folder / "t.parquet")),
    "saved": lambda rows, folder: Dataset.load(saved(rows, folder / "saved")),
    "folder": lambda rows, folder: Dataset.load(files_of_hub(rows, folder / "files")),
    "datasets": lambda rows, folder: Dataset(hub(rows)),
    "numpy": lambda rows, folder: Dataset(hub(rows).with_format("numpy")),
    "stream": lambda rows, folder: Dataset(hub(rows).to_iterable_dataset()),
    "pyarrow": lambda rows, folder: Dataset(pa.Table.from_pylist(rows)),
    "pandas": lambda rows, folder: Dataset(pd.read_parquet(file(rows, folder / "t.parquet"))),
    "function": lambda rows, folder: Dataset.load(lambda: hub(rows)),
    "registry": lambda rows, folder: DatasetRegistry.load_dataset(
        DatasetRegistry.register_dataset("mine", hub(rows)).name or ""
    ),
    "verl": lambda rows, folder: [
        row["extra_info"]
        for row in Dataset.load(DatasetRegistry.register_dataset("mine", rows).get_verl_data_path() or "")
    ],
    "sft": lambda rows, folder: rows_of_items(hub(rows)),
}
OUT_OF_A_TABLE: dict[str, Any] = {
    "list": lambda rows, folder: Dataset(hub(rows).to_list()),
    "generator": lambda rows, folder: Dataset.load(loader(rows)),
    "records": lambda rows, folder: Dataset(pd.read_parquet(file(rows, folder / "t.parquet")).to_dict("records")),
    "sft": lambda rows, folder: rows_of_items(list(hub(rows))),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rows", [CHATS, AGENT_TASKS], ids=["chats", "tasks"])
def test_table_keeps_chats_unchanged(source: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert list(SOURCES[source](rows, tmp_path)) == rows


@pytest.mark.parametrize("source", OUT_OF_A_TABLE)
def test_rows_read_from_a_table_keep_chats_unchanged(source: str, tmp_path: Path) -> None:
    assert list(OUT_OF_A_TABLE[source](CHATS[:3], tmp_path)) == CHATS[:3]


def test_explicit_nulls_are_kept(tmp_path: Path) -> None:
    properties = {"unit": {"type": ["string", "null"], "enum": ["C", None], "default": None}}
    messages = chat(call("weather", city="Bern", unit=None), call("weather", city="Rome", unit="C"), answer="Rain")
    row = {"messages": messages, "tools": [tool("weather", properties)], "seen": [{"a": None}, {"a": 1}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    (tmp_path / "t.json").write_text(json.dumps([row]))
    assert list(Dataset.load(tmp_path / "t.jsonl")) == list(Dataset.load(tmp_path / "t.json")) == [row]
    assert list(Dataset([row])) == list(Dataset.load(lambda: [row])) == rows_of_items([row]) == [row]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("source", [*SOURCES][:-3])
def test_task_fields_keep_the_values_of_the_table(source: str, tmp_path: Path) -> None:
    rows = [
        {"state": {"door": None, "key": 1}, "seen": [None, "x"]},
        {"state": {"door": "open", "key": None}, "seen": []},
    ]
    assert list(SOURCES[source](rows, tmp_path)) == rows
    calls = [
        {"name": "add", "arguments": {"a": "1"}, "hint": None},
        {"name": "f", "arguments": {"b": "2"}, "hint": "b"},
    ]
    (tmp_path / "calls").mkdir()
    assert list(SOURCES[source](calls, tmp_path / "calls")) == calls


@pytest.mark.parametrize("source", ["parquet", "saved", "datasets", "stream", "function"])
def test_json_column_is_kept_unchanged(source: str, tmp_path: Path) -> None:
    properties = {"unit": {"type": "string", "default": None}}
    rows = [
        {"messages": chat(call("w", unit=None), answer="1"), "tools": [tool("w", properties)], "own": {"a": [None]}}
    ]
    features = datasets.Features(
        {"messages": datasets.List(datasets.Json()), "tools": datasets.List(datasets.Json()), "own": datasets.Json()}
    )
    held = datasets.Dataset.from_list(rows, features=features)
    held.to_parquet(tmp_path / "t.parquet")
    held.save_to_disk(tmp_path / "saved")
    given: dict[str, Any] = {"datasets": held, "stream": held.to_iterable_dataset()}
    paths = {"parquet": tmp_path / "t.parquet", "saved": tmp_path / "saved"}
    assert list(Dataset(given[source]) if source in given else Dataset.load(paths.get(source, lambda: held))) == rows


TEXTS = {
    "tools": {**CHATS[0], "tools": json.dumps(CHATS[0]["tools"])},
    "messages": {**CHATS[0], "messages": json.dumps(CHATS[0]["messages"], indent=1)},
    "each": {**CHATS[0], **{name: list(map(json.dumps, CHATS[0][name])) for name in ("tools", "messages")}},
    "function": {
        **CHATS[0],
        "tools": [item | {"function": json.dumps(item["function"])} for item in CHATS[0]["tools"]],
    },
    "tool_calls": {
        **CHATS[0],
        "messages": [
            message | ({"tool_calls": json.dumps(message["tool_calls"])} if "tool_calls" in message else {})
            for message in CHATS[0]["messages"]
        ],
    },
    "parameters": {
        **CHATS[0],
        "tools": [
            item | {"function": item["function"] | {"parameters": json.dumps(item["function"]["parameters"])}}
            for item in CHATS[0]["tools"]
        ],
    },
}


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("source", ["parquet", "datasets", "pandas", "jsonl", "python", "sft"])
def test_chats_in_json_text_are_parsed(field: str, source: str, tmp_path: Path) -> None:
    row = TEXTS[field]
    if source == "jsonl":
        (tmp_path / "t.jsonl").write_text(json.dumps(row))
        assert list(Dataset.load(tmp_path / "t.jsonl")) == CHATS[:1]
    elif source == "python":
        assert list(Dataset([row])) == CHATS[:1]
    else:
        assert list(SOURCES[source]([row], tmp_path)) == CHATS[:1]


def test_nulls_in_json_text_are_kept(tmp_path: Path) -> None:
    tools = [tool("w", {"unit": {"type": "string", "default": None}})]
    rows = [{"tools": json.dumps(tools)}, {"tools": "null"}]
    assert list(SOURCES["parquet"](rows, tmp_path)) == [{"tools": tools}, {"tools": None}]


def test_arguments_in_openai_format_stay_text() -> None:
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [called]}]}
    assert list(Dataset([row])) == [row]


@pytest.mark.parametrize("task", [{"tools": "[hammer, saw]"}, {"messages": "Hello {name}"}, {"tools": ["saw", "{"]}])
def test_non_json_text_of_tasks_is_kept(task: dict[str, Any]) -> None:
    assert list(Dataset([task])) == [task]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"tools": '[{"type": "function",'}, r"row 1\b.*tools="),
        ({"tools": '{"type": "function"}'}, r"row 1\b.*tools=.* an object: use a list"),
        ({"messages": '[{"role": "user"'}, r"row 1\b.*messages="),
        ({"messages": [{"role": "assistant", "tool_calls": '[{"id": '}]}, r"row 1\b.*messages\[0\]\.tool_calls="),
        (
            {"tools": [{"function": {"name": "f", "parameters": "[]"}}]},
            r"tools\[0\]\.function\.parameters=.* an object",
        ),
    ],
)
def test_invalid_json_text_error_names_row_and_field(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    rows = [dict.fromkeys(row), row]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in rows))
    for read in (
        lambda: Dataset(rows),
        lambda: Dataset.load(tmp_path / "t.jsonl"),
        lambda: rows_of_items(rows),
        lambda: SOURCES["parquet"](rows, tmp_path),
    ):
        with pytest.raises(ConfigError, match=named):
            read()


def test_values_without_json_type_stay_python_values(tmp_path: Path) -> None:
    row = {"answer": Decimal("1.50"), "at": datetime(2026, 1, 2, tzinfo=UTC), "image": b"\x00", "nums": [1, 2]}
    for source in ("parquet", "saved", "datasets", "pyarrow", "pandas"):
        (task,) = SOURCES[source]([row], tmp_path / source if source == "saved" else tmp_path)
        assert task == row
        assert type(task["nums"]) is list
        assert texts_of(task["answer"], "it") == ["1.50"]
        kept = json.loads(readable_json(task))
        assert (kept["answer"], kept["at"], kept["nums"]) == ("1.50", "2026-01-02T00:00:00+00:00", [1, 2])
    with pytest.raises(ConfigError, match=r"row 0 .*\.answer is Decimal"):
        DatasetRegistry.register_dataset("mine", [row])
