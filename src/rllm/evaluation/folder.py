"""Folder of an evaluation: its identity, episodes and report, used by one process at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm._runtime.files import lock, replace_text
from rllm._runtime.untrusted import read_json
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EPISODES, to_json
from rllm.errors import ConfigError, counted
from rllm.evaluation.report import Report
from rllm.tracking.own_runs import check_contained

_OF_RUNS = ("config.yaml", "traces.db")
"""Files of a training run or a gateway."""
_ADDRESS = re.compile(rb"0x[0-9a-f]+")


@dataclass(frozen=True)
class EvaluationFolder:
    """Paths of an evaluation's files."""

    path: Path

    @property
    def episodes(self) -> Path:
        return self.path / EPISODES

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def identity(self) -> Path:
        return self.path / "evaluation.json"

    @contextmanager
    def claimed(self, identity: Mapping[str, str]) -> Iterator[None]:
        """Hold the folder exclusively for the evaluation of this identity; create it if needed.

        Raises:
            ConfigError: if another process holds it, or it has another evaluation, naming the differences.
        """
        check_contained(self.path)  # since links in it would be followed
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"out={str(self.path)!r} cannot be used: {error.strerror}; name another folder"
            ) from error
        with held:
            if not lock(held):
                raise ConfigError(
                    f"out={str(self.path)!r} is in use by another evaluation: wait for it, or name another folder"
                )
            self._check(identity)
            yield

    def write_report(self, report: Report) -> None:
        """Replace the report atomically."""
        _replace(self.report, report.to_dict())

    def _check(self, identity: Mapping[str, str]) -> None:
        if not self.identity.exists() and not self.episodes.exists():
            if others := [name for name in _OF_RUNS if (self.path / name).exists()]:
                raise ConfigError(f"out={str(self.path)!r} has a {others[0]} of another program: name another folder")
            _replace(self.identity, identity)
            return
        try:
            before = dict(read_json(self.identity))
            names = dict.fromkeys([*before, *identity])
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"out={str(self.path)!r} does not record what was evaluated ({self.identity.name}: {error}): "
                "name another folder"
            ) from error
        changes = [
            f"{name} was {before.get(name, 'not set')}, and is now {identity.get(name, 'not set')}"
            for name in names
            if before.get(name) != identity.get(name)
        ]
        if changes:
            raise ConfigError(
                f"out={str(self.path)!r} holds another evaluation: {'; '.join(changes)}. Name another folder, "
                "or continue with what was evaluated there"
            )


def dataset_identity(dataset: Dataset) -> str:
    """Return a description of a dataset's content: number of tasks and digest."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(_ADDRESS.sub(b"", to_json(row, sort_keys=True)) + b"\n")
    return f"{counted(len(dataset), 'task')} (sha256 {digest.hexdigest()[:16]})"


def file_identity(path: Path) -> str:
    """Return the digest of a file's content."""
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _replace(path: Path, data: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(data, indent=2) + "\n")
