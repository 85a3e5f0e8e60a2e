"""What a tracker was told by earlier processes of a run. It takes nothing back, so a step that is made again is not told twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rllm._runtime.files import replace_text

V = TypeVar("V")


class Told:
    """The last step of each name that a tracker was told, kept in the run's folder."""

    def __init__(self, run_dir: Path, tracker: str, *, arrived: int | None = None) -> None:
        """
        Args:
            run_dir: the run's folder.
            tracker: its name.
            arrived: the last step that the tracker itself knows of, where it can say: what was sent in a thread is lost by
                a kill, and told again.
        """
        self._path = run_dir / f".{tracker}-told"
        self._latest: dict[str, int] = json.loads(self._path.read_text()) if self._path.exists() else {}
        last = max(self._latest.values(), default=-1) if arrived is None else arrived
        self._earlier = {name: min(step, last) for name, step in self._latest.items()}

    def once(self, step: int, values: Mapping[str, V], tell: Callable[[dict[str, V]], object]) -> None:
        """Tell what no earlier process has told of this step, if anything, and remember that."""
        new = {name: value for name, value in values.items() if step > self._earlier.get(name, -1)}
        if new:
            tell(new)
            self._latest |= dict.fromkeys(new, step)
            replace_text(self._path, json.dumps(self._latest))
