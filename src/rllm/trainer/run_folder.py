"""A run's folder: held by one training process at a time, and read for how it was begun and what it has measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from rllm._runtime.files import lines_of, lock, replace_text
from rllm._runtime.untrusted import parse_json
from rllm.config.yaml_file import read_settings
from rllm.errors import ConfigError
from rllm.store import path_of
from rllm.tracking.about import BEGUN_AS

Beginning: TypeAlias = dict[str, Any]
"""Arguments of the command that began a run, by name: texts, and for `data` of `rllm train` a list of them."""
LOCK_FILE = ".lock"


def check_places(run_dir: Path, store: str | None) -> None:
    """Raise `ConfigError` for what can be neither the folder of a run nor its store; nothing is created yet."""
    nearest = nearest_folder(str(run_dir))
    if not nearest.is_dir():
        raise ConfigError(
            f"run_dir={str(run_dir)!r} cannot be created: {str(nearest)!r} is a file; choose another folder"
        )
    if (why := why_unwritable(nearest)) is not None:
        raise ConfigError(f"run_dir={str(run_dir)!r} cannot be written to ({why}): choose another folder")
    if store is not None and (path := path_of(store)) is not None and Path(path).expanduser().is_dir():
        raise ConfigError(f"store={store!r} is a folder: name a file in it, such as {str(Path(path, 'traces.db'))!r}")


@contextmanager
def in_use(run_dir: Path) -> Iterator[None]:
    """Hold the folder until the process ends; raise `ConfigError` if another process holds it."""
    try:
        held = (run_dir / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} cannot be written to ({error.strerror}): choose another folder"
        ) from error
    with held as file:
        if not lock(file):
            raise ConfigError(
                f"run_dir={str(run_dir)!r} is in use by another training process: wait for it, or choose another folder"
            )
        yield


def keep_beginning(run_dir: Path, arguments: Beginning) -> None:
    """Keep what is needed, beside the settings, to begin the run again: what its command was given, by name."""
    replace_text(run_dir / BEGUN_AS, yaml.safe_dump(dict(arguments), sort_keys=False))


def beginning_of(run_dir: Path) -> Beginning:
    """Return what `keep_beginning` stored; empty for a run that no command began."""
    path = run_dir / BEGUN_AS
    return read_settings(path)[0] if path.exists() else {}


def evaluations_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of every evaluation of a run with its `step`, in order; cut-off lines are skipped."""
    rows = map(parse_json, lines_of(run_dir / "metrics.jsonl"))
    return [row for row in rows if any(name.startswith("eval/") for name in row)]


def nearest_folder(folder: str) -> Path:
    """Return the nearest existing parent of a folder, or the folder itself."""
    path = Path(folder)
    return next(parent for parent in (path, *path.parents) if parent.exists())


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason against writing a file there, or `None`; the trial file is removed at once."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
