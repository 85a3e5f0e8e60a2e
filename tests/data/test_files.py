from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rllm.data import Dataset
from rllm.errors import ConfigError

ROWS = [{"question": "two\u2028lines", "n": 1}, {"question": "next\x85line", "n": 2}]
NESTED = [
    {"nums": [1, 2], "answer": {"text": "ä", "score": 0.5}, "at": datetime(2026, 1, 2), "raw": b"\x00"},
    {"nums": [], "answer": None, "at": None, "raw": None},
]


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_file_is_read(tmp_path: Path, ascii_only: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in ROWS]
    data = Dataset.load(file(tmp_path, "tasks.jsonl", "\r\n\n".join(lines) + "\n"))
    assert list(data) == ROWS
    assert data.name == "tasks"


def test_json_list_file_is_read(tmp_path: Path) -> None:
    path = file(tmp_path, "tasks.JSON", json.dumps(ROWS, indent=1))
    assert Dataset.load_data(str(path)).get_data() == ROWS


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert len(Dataset.load(file(tmp_path, "tasks.jsonl", b"\xef\xbb\xbf" + b'{"n": 1}\n'))) == 1
    assert list(Dataset.load(file(tmp_path, "tasks.csv", b"\xef\xbb\xbf" + b"n\n1\n"))) == [{"n": "1"}]


def test_csv_cells_are_text_and_may_be_long(tmp_path: Path) -> None:
    text = 'question,n\r\n"two\nlines, ""quoted""",1\r\n\r\n' + "x" * 200_000 + ",\r\n"
    rows = list(Dataset.load(file(tmp_path, "tasks.csv", text)))
    assert rows == [{"question": 'two\nlines, "quoted"', "n": "1"}, {"question": "x" * 200_000, "n": ""}]


def test_parquet_gives_plain_python_values(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(NESTED).append_column(
        "prices", pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32()))
    )
    parquet.write_table(table, tmp_path / "tasks.parquet", row_group_size=1)
    rows = list(Dataset.load(tmp_path / "tasks.parquet"))
    assert rows == [{**NESTED[0], "prices": {"a": 1}}, {**NESTED[1], "prices": {}}]
    assert type(rows[0]["nums"]) is list
    assert type(rows[0]["nums"][0]) is int


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"n": 1}\n\n{"n": }\n', r"t\.jsonl, line 3, column 7 is not valid JSON: Expecting value"),
        ("t.jsonl", '{"n": 1}\n\n\n7\n', r"t\.jsonl, line 4: row 1 of dataset 't' is 7: use an object"),
        ("t.jsonl", '{"n": 1}\n{"n": "\xe4"}\n'.encode("latin-1"), r"t\.jsonl, line 2 cannot be read.*as UTF-8"),
        ("t.jsonl", '{"n": ' + "1" * 5000 + "}", r"t\.jsonl, line 1 cannot be read"),
        (
            "t.jsonl",
            '{\n "n": 1\n}\n',
            r"t\.jsonl, line 1, column 2 is not valid JSON: .*; a \.jsonl file has one object a line",
        ),
        ("t.jsonl", '{"n": 1},\n{"n": 2}\n', r"t\.jsonl, line 1, column 9 is not valid JSON: .* has one object a line"),
        ("t.jsonl", '[{"n": 1}]\n', r"t\.jsonl, line 1 is a list; .*, and a \.json file a list of objects"),
        ("t.json", "[{]", r"t\.json, column 3 is not valid JSON"),
        ("t.json", '[{"n": 1},\n {"n": }]', r"t\.json, line 2, column 8 is not valid JSON"),
        ("t.json", '{"n": 1}\n{"n": 2}\n', r"line 2, column 1.*one object a line is called \.jsonl"),
        ("t.json", '{"n": 1}', "holds a dict: use a list of objects"),
        ("t.json", '[{"n": 1}, [2]]', r"t\.json, item 1: row 1 of dataset 't' is \[2\]"),
        ("t.csv", 'n,m\n"1\n2",3\n4\n', r"t\.csv, line 4 has 1 cells, and the file 2 columns"),
        ("t.csv", "n,m\n1,2\n3,4,5\n", r"t\.csv, line 3 has 3 cells"),
        ("t.csv", 'n\n1\n"2\n', r"t\.csv, line 3 is not valid CSV: unexpected end"),
        ("t.csv", b"n\n\xff\n", r"t\.csv, line 2 cannot be read"),
        ("t.csv", "n,m,n\n1,2,3\n", r"t\.csv, line 1 has several columns 'n'"),
        ("t.parquet", b"no parquet", r"t\.parquet cannot be read from row 0 on"),
        ("t.txt", "n\n1\n", r"\.txt.*\.jsonl"),
        ("t.jsonl", "\n", r"t is empty"),
        ("t.json", "[]", "t is empty"),
        ("t.csv", "n,m\n", "t is empty"),
        ("t.csv", "", "t is empty"),
    ],
)
def test_unreadable_file_is_reported(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset.load(file(tmp_path, name, content))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_missing_file_is_reported(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigError, match=rf"absent\.{suffix}.*no such file"):
        Dataset.load(tmp_path / f"absent.{suffix}")
