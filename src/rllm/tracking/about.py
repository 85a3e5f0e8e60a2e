"""Facts about a run for its trackers: name, project and settings, and what stays the same when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rllm._runtime.files import replace_text
from rllm._runtime.ids import new_id
from rllm.tracking.own_runs import settings_of

DEFAULT_PROJECT = "rllm"
DEFAULT_LOG_SAMPLES = 2
_STORE = "store"
_MAX_ID_BYTES = 4096

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class AboutRun:
    """Name, project and settings of a run."""

    name: str
    """Name of the run's folder."""
    project: str
    settings: Mapping[str, Any]
    """Whole configuration, in sections."""

    @property
    def log_samples(self) -> int:
        """Number of conversations of a step to show."""
        return int(self.settings.get("log_samples", DEFAULT_LOG_SAMPLES))

    def flat_settings(self) -> dict[str, Any]:
        """Return the settings by dotted key."""
        return dict(flat(self.settings))


def about_run(run_dir: Path) -> AboutRun:
    """Read the facts from a run's folder; a folder without `config.yaml` has no settings."""
    settings = settings_of(run_dir)
    project = settings.get("project") or DEFAULT_PROJECT
    return AboutRun(name=run_dir.resolve().name, project=str(project), settings=settings)


def kept_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id of this run in a tracker, which is made once and kept when the run is resumed."""
    path = run_dir / f".{tracker}-id"
    if not path.exists():
        replace_text(path, make())
    return path.read_text(encoding="utf-8").strip()


def kept_run_id(run_dir: Path) -> str:
    """Return the id of this run in a trace store, which several runs may share."""
    return kept_id(run_dir, _STORE, lambda: f"{run_dir.name}-{new_id()[:8]}")


def run_id_of(folder: Path) -> str | None:
    """Return the id that `kept_run_id` made for the run in this folder; `None` if there is none."""
    path = folder / f".{_STORE}-id"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(_MAX_ID_BYTES).decode(errors="replace").strip()


class LoggedSteps:
    """Last step of each name that a tracker has logged, kept in the run's folder.

    A resumed run repeats steps, and trackers cannot remove what earlier processes have logged.
    """

    def __init__(self, run_dir: Path, tracker: str, *, arrived: int | None = None) -> None:
        """Read the record of earlier processes.

        Args:
            run_dir: the run's folder.
            tracker: the tracker's name.
            arrived: last step that the tracker itself has, if it can report it. Later steps were sent in a thread and
                lost when the process was killed, so they are logged again.
        """
        self._path = run_dir / f".{tracker}-logged"
        self._latest: dict[str, int] = json.loads(self._path.read_text()) if self._path.exists() else {}
        last = max(self._latest.values(), default=-1) if arrived is None else arrived
        self._earlier = {name: min(step, last) for name, step in self._latest.items()}

    def log_new(self, step: int, values: Mapping[str, V], log: Callable[[dict[str, V]], object]) -> None:
        """Call `log` with the values that no earlier process has logged for this step, if any, and record them."""
        new = {name: value for name, value in values.items() if step > self._earlier.get(name, -1)}
        if new:
            log(new)
            self._latest |= dict.fromkeys(new, step)
            replace_text(self._path, json.dumps(self._latest))


def forget_trackers(run_dir: Path) -> None:
    """Make a run that starts again a new one to every tracker. TensorBoard events that are not ours stay."""
    events = "tensorboard/events.*" if (run_dir / ".tensorboard-logged").exists() else ""
    for pattern in filter(None, (events, ".*-id", ".*-logged")):
        for path in run_dir.glob(pattern):
            path.unlink()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
