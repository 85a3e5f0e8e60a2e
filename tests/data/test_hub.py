from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from rllm.data import Dataset
from rllm.data.sources import read_hub
from rllm.errors import ConfigError

ROWS = [{"n": 1, "words": ["a"]}, {"n": 2, "words": []}]


pytestmark = pytest.mark.usefixtures("hub_cache")


def test_folder_saved_by_datasets_is_read(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS).with_format("numpy")
    saved.save_to_disk(tmp_path / "one")
    data = Dataset.load(tmp_path / "one")
    assert (list(data), data.name) == (ROWS, "one")
    assert type(data[0]["n"]) is int


def test_folder_with_splits_requires_one_of_them(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "both")
    assert list(Dataset.load(tmp_path / "both", split="test")) == ROWS[1:]
    with pytest.raises(ConfigError, match=r"split=None: '.*both' has the splits train, test; choose one"):
        Dataset.load(tmp_path / "both")


def test_folder_of_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert list(Dataset.load(tmp_path / "files")) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert read_hub(str(tmp_path / "files"), split="train", limit=2) == [{"n": 1}, {"n": 2}]
    with pytest.raises(ConfigError, match=r"cannot be loaded: Unknown split .*split='dev'"):
        Dataset.load(tmp_path / "files", split="dev")


def test_unreachable_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for source in ("hf:gsm8k", "openai/gsm8k"):
        with pytest.raises(ConfigError, match=r"gsm8k' cannot be reached.*or name a local file or folder"):
            Dataset.load(source, subset="main", split="train")
