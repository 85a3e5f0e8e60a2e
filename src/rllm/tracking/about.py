"""What trackers tell of a run beside its metrics: its name, its project, its settings; and the id that it keeps when resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm._runtime.files import replace_text
from rllm._runtime.ids import new_id
from rllm.tracking.own_runs import settings_of

DEFAULT_PROJECT = "rllm"
DEFAULT_LOG_SAMPLES = 2
_STORE = "store"
_LONGEST_ID = 4096


@dataclass(frozen=True, kw_only=True)
class AboutRun:
    """A run, as people know it."""

    name: str
    """That of its folder."""
    project: str
    settings: Mapping[str, Any]
    """Its whole configuration, in sections."""

    @property
    def log_samples(self) -> int:
        """How many conversations of a step are shown."""
        return int(self.settings.get("log_samples", DEFAULT_LOG_SAMPLES))

    def flat_settings(self) -> dict[str, Any]:
        """The settings by dotted key."""
        return dict(flat(self.settings))


def about_run(run_dir: Path) -> AboutRun:
    """Return what the run's folder says of it; a folder without `config.yaml` has no settings."""
    settings = settings_of(run_dir)
    project = settings.get("project") or DEFAULT_PROJECT
    return AboutRun(name=run_dir.resolve().name, project=str(project), settings=settings)


def kept_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """The id by which a tracker knows this run: made once, and the same when the run is resumed."""
    path = run_dir / f".{tracker}-id"
    if not path.exists():
        replace_text(path, make())
    return path.read_text(encoding="utf-8").strip()


def kept_run_id(run_dir: Path) -> str:
    """The id by which a trace store, which several runs may share, knows this run."""
    return kept_id(run_dir, _STORE, lambda: f"{run_dir.name}-{new_id()[:8]}")


def run_id_of(folder: Path) -> str | None:
    """The same, if the folder is of a run that has one."""
    path = folder / f".{_STORE}-id"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(_LONGEST_ID).decode(errors="replace").strip()


def forget_trackers(run_dir: Path) -> None:
    """Let a run that begins again from nothing be a new one to every tracker. Events that no run of ours wrote stay."""
    events = "tensorboard/events.*" if (run_dir / ".tensorboard-told").exists() else ""
    for pattern in filter(None, (events, ".*-id", ".*-told")):
        for path in run_dir.glob(pattern):
            path.unlink()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
