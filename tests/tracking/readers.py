"""Values that each tracker has written, read from its own files: numbers by step and name, and tables by name."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Numbers = dict[tuple[int, str], list[float]]
"""Every value that was written for a step and a name, in order."""
Tables = dict[str, list[dict[str, Any]]]


def read_jsonl(run_dir: Path) -> tuple[Numbers, Tables]:
    numbers: Numbers = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        step, *values = json.loads(line).items()
        for name, value in values:
            numbers.setdefault((step[1], name), []).append(math.nan if value is None else value)
    return numbers, {}


def read_tensorboard(run_dir: Path) -> tuple[Numbers, Tables]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    numbers: Numbers = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            numbers.setdefault((event.step, name), []).append(event.value)
    tables: Tables = {}
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            if name.startswith("samples/"):
                tables.setdefault(name, []).extend(_of_markdown(event.tensor_proto.string_val[0].decode()))
    return numbers, tables


def _of_markdown(table: str) -> list[dict[str, Any]]:
    columns, _, *rows = (line[2:-2].split(" | ") for line in table.splitlines())
    return [
        dict(zip(columns, (html.unescape(cell.replace("<br>", "\n")) for cell in row), strict=True)) for row in rows
    ]


def read_wandb(run_dir: Path, *, has_ended: bool = True) -> tuple[Numbers, Tables]:
    """Return the run by its id, of which each process has written a part."""
    numbers: Numbers = {}
    tables: Tables = {}
    parts = sorted((run_dir / "wandb").glob(f"offline-run-*/run-{(run_dir / '.wandb-id').read_text()}.wandb"))
    for file in parts:
        for record in _whole_wandb_run(file) if has_ended and file == parts[-1] else _wandb_records(file.read_bytes()):
            items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
            for (name, *part), value in items.items():
                if part == ["path"]:
                    written = json.loads((file.parent / "files" / value).read_text())
                    rows = [dict(zip(written["columns"], row, strict=True)) for row in written["data"]]
                    tables.setdefault(name, []).extend(rows)
                elif not part and name != "step" and not name.startswith("_"):
                    numbers.setdefault((items[("step",)], name), []).append(float(value))
    return numbers, tables


def _whole_wandb_run(file: Path) -> list[Any]:
    """Return the records of a run that has ended; W&B's own process writes the last of them shortly after `finish`."""
    deadline = time.monotonic() + 60
    while True:
        records = list(_wandb_records(file.read_bytes()))
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


def _wandb_records(content: bytes) -> Iterator[Any]:
    """Yield the records of LevelDB's log format: blocks of 32 KiB with parts after checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, joined = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        joined += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(joined)
            joined = b""


def read_mlflow(run_dir: Path) -> tuple[Numbers, Tables]:
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run((run_dir / ".mlflow-id").read_text())
    numbers: Numbers = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            numbers.setdefault((metric.step, name), []).append(metric.value)
    tables = {}
    for listed in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]")):
        found = client.load_table(run.info.experiment_id, listed["path"], [run.info.run_id])
        tables[listed["path"].removesuffix(".json")] = found.to_dict("records")
    return numbers, tables


def read_trackio(run_dir: Path) -> tuple[Numbers, Tables]:
    from trackio.sqlite_storage import SQLiteStorage

    numbers: Numbers = {}
    tables: Tables = {}
    for line in SQLiteStorage.get_logs("fruit", (run_dir / ".trackio-id").read_text()):
        for name, value in line.items():
            if isinstance(value, dict):
                tables.setdefault(name, []).extend(value["_value"])
            elif name not in ("step", "timestamp"):
                numbers.setdefault((line["step"], name), []).append(float(value))
    return numbers, tables


READERS = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
