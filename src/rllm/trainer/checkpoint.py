"""Checkpoints that are whole or not there, and the newest of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError

_NAME = re.compile(r"step-\d+")
_UNFINISHED = ".partial"
STATE_FILE = "trainer_state.json"


class Checkpoints:
    """The checkpoint folders of a run: `checkpoints/step-000020`, ..."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Let `write` fill a folder, then put it in place in one step, so that a crash never leaves half of one.

        `step` training steps are done; `state` is kept beside the weights. The oldest checkpoints go.
        """
        target = self._folder / f"step-{step:06d}"
        for abandoned in self._folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(abandoned, ignore_errors=True)
        scratch = target.with_suffix(_UNFINISHED)
        scratch.mkdir(parents=True)
        write(scratch)
        (scratch / STATE_FILE).write_text(json.dumps({"step": step, **state}))
        for file in (*scratch.iterdir(), scratch):
            _flush(file)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        _flush(self._folder)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FILE).exists()]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.all()
        return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` kept beside the weights.

    Raises:
        ConfigError: if the folder is not a checkpoint.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint={str(checkpoint)!r} has no readable {STATE_FILE}: {error}") from error
    return state


def _flush(path: Path) -> None:
    """Make the file, or the folder's entries, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
