from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.data import Dataset
from rllm.errors import ConfigError

ROWS = [{"question": "two\u2028lines", "n": 1}, {"question": "next\x85line", "n": 2}]


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines(tmp_path: Path, ascii_only: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in ROWS]
    data = Dataset.load(file(tmp_path, "tasks.jsonl", "\r\n\n".join(lines) + "\n"))
    assert list(data) == ROWS
    assert data.name == "tasks"


def test_a_json_list(tmp_path: Path) -> None:
    assert Dataset.load(str(file(tmp_path, "tasks.json", json.dumps(ROWS)))).get_data() == ROWS


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert len(Dataset.load(file(tmp_path, "tasks.jsonl", b"\xef\xbb\xbf" + b'{"n": 1}\n'))) == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tasks.jsonl", '{"n": 1}\n\n{"n": }\n', r"tasks\.jsonl, line 3, column 7 is not valid JSON"),
        ("tasks.json", "[{]", r"tasks\.json, column 3 is not valid JSON"),
        ("tasks.json", '{"n": 1}', "holds a dict: use a list of objects"),
        ("tasks.jsonl", '{"n": 1}\n7\n', "row 1 of dataset 'tasks' is 7: use an object"),
        ("tasks.csv", "n\n1\n", r"files of type '\.csv' are not read; use \.jsonl or \.json"),
        ("tasks.jsonl", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Dataset.load(file(tmp_path, name, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl.*No such file"):
        Dataset.load(tmp_path / "absent.jsonl")


def test_a_row_that_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match="row 1 of the dataset is 'b'"):
        Dataset([{"a": 1}, "b"])  # type: ignore[list-item]


def test_columns_are_the_fields_of_every_row() -> None:
    assert Dataset([{"a": 1}, {"b": 3}, {"a": 4}]).shapes() == {frozenset("a"): 0, frozenset("b"): 1}
    assert Dataset([]).shapes() == {}


@pytest.mark.parametrize(
    ("row", "task_id"),
    [({"task_id": "x:1", "id": 5}, "x:1"), ({"id": 5}, "5"), ({"question": "q"}, "0")],
)
def test_a_row_has_its_own_id_or_its_number(row: dict[str, Any], task_id: str) -> None:
    assert Dataset([row]).task_id(0) == task_id


def test_a_dataset_is_a_sequence() -> None:
    data = Dataset(ROWS, name="mine", split="train")
    assert (len(data), data[0], data[-1:], data.split) == (2, ROWS[0], [ROWS[1]], "train")
