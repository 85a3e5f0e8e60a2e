from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.data import Dataset, DatasetRegistry
from rllm.errors import ConfigError

MIXED = [
    {"question": "Ω\u2028\x85 你好 \ud800", "answer": 2**80, "notes": {"nums": [1, 2.5, None, {"deep": []}]}},
    {"question": "", "answer": "text", "notes": [True, math.inf]},
    {"other": None},
]


def test_registered_rows_are_loaded_without_loss(home: Path) -> None:
    given = DatasetRegistry.register_dataset("mixed", MIXED, "train", source="by hand")
    loaded = DatasetRegistry.load_dataset("mixed", "train")
    assert loaded is not None
    assert list(loaded) == list(given) == MIXED
    assert [set(row) for row in loaded] == [set(row) for row in MIXED]
    assert (loaded.name, loaded.split) == ("mixed", "train")
    assert loaded.get_data_path() == given.get_data_path() == str(home / "datasets" / "mixed" / "train.jsonl")
    assert loaded.shuffle().get_data_path() is None
    assert list(Dataset.load(str(loaded.get_data_path()))) == MIXED
    assert DatasetRegistry.get_metadata("mixed", "train") == {"source": "by hand"}
    assert DatasetRegistry.get_metadata("mixed", "test") == {}


def test_numpy_numbers_are_kept_as_numbers(home: Path) -> None:
    data = DatasetRegistry.register_dataset("numpy", [{"n": np.int64(3), "nums": np.arange(2)}])
    assert list(data) == [{"n": 3, "nums": [0, 1]}]
    assert type(data[0]["n"]) is int


def test_repeated_registration_replaces_rows_and_notes(home: Path) -> None:
    DatasetRegistry.register_dataset("again", [{"n": 1}] * 3, seed=1)
    DatasetRegistry.register_dataset("again", ({"n": n} for n in (7, 8)))
    assert list(DatasetRegistry.load_dataset("again") or []) == [{"n": 7}, {"n": 8}]
    assert DatasetRegistry.get_metadata("again") == {}


def test_datasets_are_listed_and_removed(home: Path) -> None:
    assert DatasetRegistry.get_dataset_names() == []
    for name, split in [("b", "train"), ("a", "test"), ("a", "train"), ("日本", "default")]:
        DatasetRegistry.register_dataset(name, [{"n": 1}], split)
    assert DatasetRegistry.get_dataset_names() == ["a", "b", "日本"]
    assert DatasetRegistry.get_dataset_splits("a") == ["test", "train"]
    assert DatasetRegistry.dataset_exists("a")
    assert DatasetRegistry.dataset_exists("a", "test")
    assert not DatasetRegistry.dataset_exists("a", "dev")
    assert DatasetRegistry.remove_dataset_split("a", "test")
    assert not DatasetRegistry.remove_dataset_split("a", "test")
    assert DatasetRegistry.get_dataset_splits("a") == ["train"]
    assert DatasetRegistry.remove_dataset_split("a", "train")
    assert DatasetRegistry.remove_dataset("b")
    assert not DatasetRegistry.remove_dataset("b")
    assert DatasetRegistry.get_dataset_names() == ["日本"]
    assert sorted(path.name for path in (home / "datasets").iterdir()) == [".lock", "日本"]


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("count", "train", "dataset 'count' is not registered; registered datasets: mine"),
        ("mine", "test", "dataset 'mine' has no split 'test'; it has train"),
        ("math500", "test", "python -m rllm.data.prepare math500"),
    ],
)
def test_missing_dataset_is_none_with_a_warning(
    home: Path, caplog: pytest.LogCaptureFixture, name: str, split: str, expected: str
) -> None:
    DatasetRegistry.register_dataset("mine", [{"n": 1}], "train")
    assert DatasetRegistry.load_dataset(name, split) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert expected in record.getMessage()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0", ".hidden", "a b", "x" * 101, "é" * 51, None]
)
def test_dataset_name_cannot_be_a_path(home: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset=.* cannot be the name of a file: use letters"):
        DatasetRegistry.register_dataset(name, [{"n": 1}])
    with pytest.raises(ConfigError, match="split="):
        DatasetRegistry.load_dataset("fine", name)
    with pytest.raises(ConfigError, match="dataset="):
        DatasetRegistry.remove_dataset(name)
    assert not home.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "dataset 'bad', split 'default': there are no rows to register"),
        ([{"n": 1}, 2], "row 1 of dataset 'bad' is 2"),
        (
            [{"n": 1}, {"n": {"raw": b"x"}}],
            r"row 1 of dataset 'bad'\.n\.raw.*'bytes'",
        ),
    ],
)
def test_invalid_rows_keep_the_existing_dataset(home: Path, data: Any, message: str) -> None:
    DatasetRegistry.register_dataset("bad", [{"n": 0}])
    with pytest.raises(ConfigError, match=message):
        DatasetRegistry.register_dataset("bad", data)
    assert list(DatasetRegistry.load_dataset("bad") or []) == [{"n": 0}]


def test_damaged_file_is_reported(home: Path) -> None:
    path = Path(str(DatasetRegistry.register_dataset("mine", [{"n": 1}]).get_data_path()))
    path.write_text('{"n": 1}\n{"n"')
    with pytest.raises(ConfigError, match=r"default\.jsonl, line 2, column 5 is not valid JSON"):
        DatasetRegistry.load_dataset("mine")


def test_unwritable_home_is_reported(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(ConfigError, match=r"RLLM_HOME"):
        DatasetRegistry.register_dataset("mine", [{"n": 1}])


REGISTER = """
import sys
from rllm.data import DatasetRegistry

writer = int(sys.argv[1])
sys.stdin.readline()
for _ in range(20):
    DatasetRegistry.register_dataset("shared", [{"writer": writer}] * 50, "train", writer=writer)
    DatasetRegistry.register_dataset(f"own{writer}", [{"writer": writer}])
    loaded = DatasetRegistry.load_dataset("shared", "train")
    assert len({row["writer"] for row in loaded}) == 1 and len(loaded) == 50
"""


@pytest.mark.slow
def test_processes_can_register_at_the_same_time(home: Path) -> None:
    commands = [[sys.executable, "-c", REGISTER, str(writer)] for writer in range(2)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert DatasetRegistry.get_dataset_names() == ["own0", "own1", "shared"]
    rows = DatasetRegistry.load_dataset("shared", "train")
    assert rows is not None
    assert DatasetRegistry.get_metadata("shared", "train") == rows[0]
    assert sorted(path.name for path in (home / "datasets" / "shared").iterdir()) == ["train.jsonl", "train.metadata"]
