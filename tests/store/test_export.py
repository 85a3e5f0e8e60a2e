import json
import math
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rllm.errors import ConfigError, MissingDependencyError, StoreError
from rllm.store.maintenance import export_traces
from rllm.types import Trace

from .sample_traces import trace_of, turn_of

TRACES = [turn_of(3), trace_of(error="half \ud83e", metadata={"n": 2**70, "words": "müsli"}, weight_version=3)]


def test_json_lines_have_every_field(tmp_path: Path):
    assert export_traces(TRACES, tmp_path / "out.jsonl", "jsonl") == 2
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [Trace.from_dict(json.loads(line)) for line in lines] == TRACES
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("words", ["whole", "half \ud83e"])
def test_json_lines_are_valid_json_for_any_content(tmp_path: Path, words: str):
    trace = trace_of(logprobs=[math.nan, -math.inf], response={"role": "assistant", "content": words})
    export_traces([trace], tmp_path / "out.jsonl", "jsonl")
    output = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=pytest.fail)
    assert (output["logprobs"], output["response"]["content"]) == ([None, None], words)


def test_parquet_has_ids_as_numbers_and_messages_as_json(tmp_path: Path):
    assert export_traces(TRACES, tmp_path / "out.parquet", "parquet") == 2
    first, second = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (first["prompt_ids"], first["logprobs"]) == (turn_of(3).prompt_ids, [-0.25] * 10)
    assert json.loads(first["messages"]) == turn_of(3).messages
    assert json.loads(second["metadata"]) == {"n": 2**70, "words": "müsli"}
    assert (second["weight_version"], second["error"]) == (3, "half \\ud83e")


def test_empty_store_gives_an_empty_file(tmp_path: Path):
    assert export_traces([], tmp_path / "out.jsonl", "jsonl") == 0
    assert export_traces([], tmp_path / "out.parquet", "parquet") == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_failed_export_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def broken():
        yield TRACES[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"out\.jsonl.*No space left"):
        export_traces(broken(), path, "jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match="No such file or directory"):
        export_traces(TRACES, tmp_path / "nowhere" / "out.jsonl", "jsonl")


def test_export_does_not_replace_a_device(tmp_path: Path):
    """Nothing else would keep a user with the right to do so from replacing `/dev/stdout` by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "out"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(ConfigError, match="cannot be written"):
            export_traces(TRACES, path, "jsonl")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "pipe"]
    assert pipe.is_fifo()


def test_export_to_a_link_writes_its_target(tmp_path: Path):
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    assert export_traces(TRACES, tmp_path / "link.jsonl", "jsonl") == len(TRACES)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == len(TRACES)


def test_export_of_unreadable_traces_leaves_nothing(tmp_path: Path):
    def damaged():
        yield TRACES[0]
        raise StoreError("damaged")

    with pytest.raises(StoreError, match="damaged"):
        export_traces(damaged(), tmp_path / "out.jsonl", "jsonl")
    assert list(tmp_path.iterdir()) == []


def test_missing_parquet_package_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # Python's own way to fail an import
    with pytest.raises(MissingDependencyError, match=r"pyarrow.*rllm\[data\]"):
        export_traces([], tmp_path / "traces.parquet", "parquet")
    assert list(tmp_path.iterdir()) == []
