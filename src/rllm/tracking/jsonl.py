"""`metrics.jsonl`: one object a line, the record that every run has."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from rllm._runtime.files import sync
from rllm.types import Episode

logger = logging.getLogger(__name__)

RECORD_FILE = "metrics.jsonl"
_VARIES = re.compile(r"(^|/)(timing|memory)/|^tokens/per_second")


class JSONLTracker:
    """Appends `{"step": n, name: value, ...}` lines to the run's `metrics.jsonl`. What cannot be written, as on a full disk, is kept
    and written before the next line."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / RECORD_FILE).open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # orjson writes what is not a number as null; `NaN` is not JSON.
        line = orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY)
        self._unwritten += line + b"\n"
        try:
            self._write()
        except OSError as error:
            logger.warning("%s lacks step %d until a later one can be written: %s", self._file.name, step, error)

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        sync(self._file.fileno())

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """Episodes are in the store."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._write()
        except OSError as error:
            logger.warning("%s lacks its last lines: %s", self._file.name, error)
        self._file.close()


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a run has in common with one that was killed and resumed, bit for bit, on the CPU in float32: all
    but times, rates and memory."""
    return {name: value for name, value in metrics.items() if not _VARIES.search(name)}


def last_step(path: Path) -> int:
    """The last step of which a line tells; 0 where there is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((int(json.loads(line)["step"]) for line in lines if _stays(line, math.inf, True)), default=0)


def forget_after(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of later steps, which a run that resumes at `step` will make again.

    `evaluated` says whether that step's evaluation stays, too. The file is replaced in one step.
    """
    if path.exists():
        with path.open("rb") as old:  # in bytes only a newline ends a line, and half a letter is no error
            lines = list(old)
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.writelines(line for line in lines if _stays(line, step, evaluated))
            file.flush()
            sync(file.fileno())
        new.replace(path)


def _stays(line: bytes, step: float, evaluated: bool) -> bool:
    """A line that a crash cut off does not."""
    try:
        metrics = json.loads(line)
        later = float(metrics["step"]) > step
    except (ValueError, KeyError, TypeError):
        return False
    if later or not line.endswith(b"\n"):
        return False
    return evaluated or metrics["step"] != step or not any(name.startswith("eval/") for name in metrics)
