from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet

from rllm.data import DatasetRegistry
from rllm.errors import ConfigError


def test_registered_dataset_is_written_in_verl_format(home: Path) -> None:
    rows = [{"question": "?", "nums": [1, 2]}, {"question": "!", "data_source": "other"}]
    data = DatasetRegistry.register_dataset("mine", rows, "train")
    path = data.get_verl_data_path()
    assert path == str(home / "datasets" / "mine" / "train.parquet")
    first, second = parquet.read_table(path).to_pylist()
    assert [message["role"] for message in first["prompt"]] == ["user"]
    assert (first["data_source"], second["data_source"]) == ("mine", "other")
    assert first["extra_info"] == {"question": "?", "nums": [1, 2], "data_source": None}
    assert second["extra_info"] == {"question": "!", "nums": None, "data_source": "other"}
    assert DatasetRegistry.get_dataset_splits("mine") == ["train"]
    assert DatasetRegistry.remove_dataset_split("mine", "train")
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": 1}, {"a": "x"}], "field 'a' of 'mine' does not fit one Parquet column"),
        ([{"a": 2**80}], "field 'a' of 'mine'"),
        ([{"a": {}}], "'mine' cannot be written as Parquet"),
    ],
)
def test_values_unsupported_by_parquet_are_reported(home: Path, rows: list[dict[str, object]], message: str) -> None:
    data = DatasetRegistry.register_dataset("mine", rows)
    with pytest.raises(ConfigError, match=message):
        data.get_verl_data_path()
    assert sorted(path.suffix for path in (home / "datasets" / "mine").iterdir()) == [".jsonl", ".metadata"]
