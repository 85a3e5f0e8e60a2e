"""`metrics.jsonl`: one object per line, the record that every run has."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import orjson

from rllm._runtime.files import new_file, sync
from rllm.tracking.base import Tracker

logger = logging.getLogger(__name__)

RECORD_FILE = "metrics.jsonl"


class JSONLTracker(Tracker):
    """Appends `{"step": n, name: value, ...}` lines to the run's `metrics.jsonl`.

    Lines that cannot be written, as on a full disk, are kept and written before the next one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / RECORD_FILE).open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # orjson writes NaN as null; `NaN` is not JSON.
        line = orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY)
        self._unwritten += line + b"\n"
        try:
            self._write()
        except OSError as error:
            logger.warning(
                "%s: step %d could not be written; it is written with the next one: %s", self._file.name, step, error
            )

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        sync(self._file.fileno())

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._write()
        except OSError as error:
            logger.warning("%s: the last lines could not be written: %s", self._file.name, error)
        self._file.close()


def last_step(path: Path) -> int:
    """Return the last step with a line; 0 if there is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((int(json.loads(line)["step"]) for line in lines if _stays(line, math.inf, True)), default=0)


def forget_after(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines after a step, which a resumed run repeats, and unless `evaluated` the evaluation after it."""
    if path.exists():
        with path.open("rb") as old:  # in bytes only a newline ends a line, and half a character is not an error
            lines = list(old)
        with new_file(path) as new:
            new.write_bytes(b"".join(line for line in lines if _stays(line, step, evaluated)))


def _stays(line: bytes, step: float, evaluated: bool) -> bool:
    """Return whether a line is kept; one that a crash cut off is not."""
    try:
        metrics = json.loads(line)
        later = float(metrics["step"]) > step
    except (ValueError, KeyError, TypeError):
        return False
    if later or not line.endswith(b"\n"):
        return False
    return evaluated or metrics["step"] != step or not any(name.startswith("eval/") for name in metrics)
