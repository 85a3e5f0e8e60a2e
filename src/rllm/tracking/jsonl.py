"""`metrics.jsonl`: one object a line, the record that every run has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from rllm.types import Episode


class JSONLTracker:
    """Appends `{"step": n, name: value, ...}` lines to the run's `metrics.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # orjson writes what is not a number as null; `NaN` is not JSON.
        self._file.write(orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
        self._file.flush()

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """Episodes are in the store."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        self._file.close()


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, which a run that resumes at `step` will make again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _step_of(line) <= step), encoding="utf-8")


def _step_of(line: str) -> float:
    """The step of a line; one that a crash cut off counts as later than all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
