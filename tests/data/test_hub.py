from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from rllm.data import Dataset
from rllm.data.sources import read_hub
from rllm.errors import ConfigError

ROWS = [{"n": 1, "words": ["a"]}, {"n": 2, "words": []}]


pytestmark = pytest.mark.usefixtures("hub_cache")


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS).with_format("numpy")
    saved.save_to_disk(tmp_path / "one")
    data = Dataset.load(tmp_path / "one")
    assert (list(data), data.name) == (ROWS, "one")
    assert type(data[0]["n"]) is int


def test_a_folder_with_splits(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "both")
    assert list(Dataset.load(tmp_path / "both", split="test")) == ROWS[1:]
    with pytest.raises(ConfigError, match=r"split=None: '.*both' has the splits train, test; choose one"):
        Dataset.load(tmp_path / "both")


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert list(Dataset.load(tmp_path / "files")) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert read_hub(str(tmp_path / "files"), split="train", limit=2) == [{"n": 1}, {"n": 2}]
    with pytest.raises(ConfigError, match=r"cannot be loaded: Unknown split .*split='dev'"):
        Dataset.load(tmp_path / "files", split="dev")


def test_the_hub_out_of_reach_is_said_with_the_remedy(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    program = """
from rllm.data import Dataset
from rllm.errors import ConfigError
from rllm.data.prepare import main

for source in ("hf:gsm8k", "openai/gsm8k"):
    try:
        Dataset.load(source, subset="main", split="train")
    except ConfigError as error:
        print(error)
main(["gsm8k", "--train", "3"])
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "RLLM_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    first, second = done.stdout.splitlines()
    assert first.startswith("Hugging Face dataset 'gsm8k' cannot be reached")
    assert second.startswith("Hugging Face dataset 'openai/gsm8k' cannot be reached")
    assert "or name a local file or folder" in second
    assert done.stderr.splitlines()[-1] == second
