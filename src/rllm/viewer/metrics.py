"""Reader of a run's `metrics.jsonl` while it grows."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rllm._runtime.files import MAX_LINE_BYTES
from rllm._runtime.untrusted import parse_json

Row: TypeAlias = Mapping[str, Any]
"""Metrics of one step, from all its lines."""


class MetricsFile:
    """Rows of a file by step, in order; thread-safe.

    A file that was truncated, as by a resumed run, is read again from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0
        self._rows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """Return the rows logged so far.

        Incomplete lines are skipped; a file that cannot be read has no rows.
        """
        with self._lock:
            try:
                found = self.path.stat()
            except OSError:
                return []
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._offset, self._inode, self._rows = 0, found.st_ino, {}
            if found.st_size > self._offset:
                with suppress(OSError):
                    self._read_on()
            return [self._rows[step] for step in sorted(self._rows)]

    def _read_on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            found = parse_json(line)
            step = int(found["step"])
            numbers = {name: value for name, value in found.items() if value is None or isinstance(value, int | float)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return  # an incomplete line of a crashed process
        # A new dict, since other threads may read the old one.
        self._rows[step] = {**self._rows.get(step, {}), **numbers, "step": step}


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return the numeric values of a metric by step."""
    return [
        (int(row["step"]), float(row[name]))
        for row in rows
        if isinstance(row.get(name), int | float) and not isinstance(row.get(name), bool)
    ]


def is_trained(row: Row) -> bool:
    """Return whether a row belongs to a training step, not only to an evaluation."""
    return "timing/step_s" in row


def neighbours(steps: Sequence[int], step: int) -> tuple[int | None, int | None]:
    """Return the steps before and after one."""
    place = bisect_left(steps, step)
    before = steps[place - 1] if place > 0 else None
    place += place < len(steps) and steps[place] == step
    return before, steps[place] if place < len(steps) else None
