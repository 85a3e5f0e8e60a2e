"""Checkpoints that are complete or absent, and the states of random number generators that they keep."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from rllm._runtime.files import flush, replace_text
from rllm._runtime.untrusted import read_json
from rllm.errors import CheckpointError, ConfigError, WorkerError
from rllm.types import JSONMapping, JSONObject

_NAME = re.compile(r"step-\d+")
_UNFINISHED = ".partial"
STATE_FILE = "trainer_state.json"


class Checkpoints:
    """The checkpoint folders of a run: `checkpoints/step-000020`, ..."""

    def __init__(self, run_dir: Path, *, keep: int, keep_best: str | None = None) -> None:
        """Keep the newest `keep` checkpoints, and the best by the metric `keep_best`."""
        self.run_dir = run_dir
        self._folder = run_dir / "checkpoints"
        self._keep = keep
        self._keep_best = keep_best
        self._saving = threading.Lock()
        """Held during a save. A save that was abandoned, by a second Ctrl-C for example, continues in its thread, and
        the next one waits for it."""

    def save(self, step: int, write: Callable[[Path], None], state: JSONObject) -> Path:
        """Let `write` fill a folder, then rename it into place, so that a crash never leaves an incomplete checkpoint.

        `step` is the number of training steps done. `state` is stored with the weights; its `score` ranks the
        checkpoint. If the step is saved already, only its state is replaced. The oldest checkpoints are deleted, except
        the best one if `keep_best` is set.

        Raises:
            CheckpointError: if it cannot be written, for example because the disk is full or a worker has ended.
        """
        with self._saving:
            try:
                return self._saved(step, write, state)
            # torch, safetensors and workers have errors of their own for a full disk
            except (OSError, RuntimeError, SafetensorError, WorkerError) as error:
                self._clear()
                latest = self.latest()
                raise CheckpointError(
                    f"the checkpoint of step {step} cannot be written to {str(self._folder)!r} "
                    f"({type(error).__name__}: {error}): check whether its disk is full or read-only, and resume; "
                    + (f"{latest.name} is complete" if latest else "there is none before it")
                ) from error

    def _saved(self, step: int, write: Callable[[Path], None], state: JSONObject) -> Path:
        target = self._path_of(step)
        self._clear()
        if self.have(step):
            _write_state(target, step, state)
            return target
        scratch = target.with_suffix(_UNFINISHED)
        scratch.mkdir(parents=True)
        write(scratch)
        _write_state(scratch, step, state)
        for path in (*scratch.rglob("*"), scratch):
            flush(path)
        _remove(target)
        scratch.rename(target)
        flush(self._folder)
        best = None if self._keep_best is None else self.best()
        for old in self.all()[: -self._keep]:
            if old != best:
                _remove(old)
        return target

    def _clear(self) -> None:
        for abandoned in self._folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(abandoned, ignore_errors=True)

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FILE).exists()]
        return sorted(found, key=_step_of)

    def have(self, step: int) -> bool:
        """Return whether a complete checkpoint of this step exists."""
        return self._path_of(step) in self.all()

    def _path_of(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """Return the checkpoint with the highest score, the earliest of equal ones; `None` if none has one."""
        scored = self._scored()
        return max(scored, key=scored.__getitem__, default=None)

    def best_score(self) -> float | None:
        """Return the score of the best checkpoint."""
        return max(self._scored().values(), default=None)

    def _scored(self) -> dict[Path, float]:
        """Return complete checkpoints with their scores, except scores by another metric from before a resume."""
        states: dict[Path, JSONObject] = {}
        for path in self.all():
            with suppress(ConfigError):  # a damaged one has no score
                states[path] = read_state(path)
        metrics = {path: state.get("config", {}).get("keep_best") for path, state in states.items()}
        metric = self._keep_best or next(reversed(metrics.values()), None)
        return {
            path: state["score"]
            for path, state in states.items()
            if state.get("score") is not None and metrics[path] in (None, metric)
        }

    def way_back(self, damaged: Path) -> str:
        """Return the remedy for a checkpoint that cannot be loaded."""
        earlier = [path for path in self.all() if _step_of(path) < _step_of(damaged) and damage_of(path) is None]
        if not earlier:
            return "there is no complete checkpoint before it: start over in another run_dir"
        return f"delete this folder to resume from {str(earlier[-1])!r}, which is complete"


def read_state(checkpoint: Path) -> JSONObject:
    """Return the state saved with the weights; raise `ConfigError` if the checkpoint is not complete."""
    try:
        state = read_json(checkpoint / STATE_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint={str(checkpoint)!r} has no readable {STATE_FILE}: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise ConfigError(f"checkpoint={str(checkpoint)!r} is not a checkpoint of rllm: its {STATE_FILE} has no step")
    for name, size in state.get("files", {}).items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ConfigError(f"checkpoint={str(checkpoint)!r} is damaged: {name} {what}")
    return state


def damage_of(checkpoint: Path) -> ConfigError | None:
    """Return the error of `read_state` for a damaged checkpoint."""
    try:
        read_state(checkpoint)
    except ConfigError as error:
        return error
    return None


def score_of(metrics: Mapping[str, float], name: str | None, *, is_known: bool = False) -> float | None:
    """Return the value that ranks checkpoints, where higher is better; for `-name`, it is the negated metric.

    Returns `None` if the metric is NaN, or if this evaluation lacks it but earlier ones had it (`is_known`).
    Raises `ConfigError` if no evaluation has it.
    """
    if name is None:
        return None
    metric = name.removeprefix("-")
    if metric not in metrics:
        if is_known:
            return None
        known = ", ".join(other for other in metrics if other.startswith("eval/"))
        raise ConfigError(f"keep_best={name!r} is not a metric of evaluations: use one of {known}")
    value = metrics[metric] if metric == name else -metrics[metric]
    return None if math.isnan(value) else value


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _write_state(folder: Path, step: int, state: JSONObject) -> None:
    """Replace the state in one step; it lists the sizes of all other files, by which a truncated one is recognized."""
    others = (path for path in folder.rglob("*") if path.is_file() and path.name.removesuffix(".new") != STATE_FILE)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(others)}
    replace_text(folder / STATE_FILE, json.dumps({**state, "step": step, "files": files}))


def _remove(folder: Path) -> None:
    """Rename a checkpoint before it is deleted piece by piece, so that none is ever incomplete."""
    if folder.exists():
        folder = folder.rename(folder.with_name(f"{folder.name}-old{_UNFINISHED}"))
        shutil.rmtree(folder, ignore_errors=True)


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> JSONObject:
    """Return the states of the generators of Python, numpy and torch, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_generators(states: JSONMapping) -> None:
    """Restore the generators; on GPUs only if the number of GPUs has not changed."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states["cuda"]])


def _text(state: torch.Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
