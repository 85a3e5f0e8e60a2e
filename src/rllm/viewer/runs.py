"""Run folders, evaluations and trace stores to show, and their contents."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from msgspec import DecodeError, Struct
from msgspec.json import decode

from rllm._runtime.untrusted import TooLargeError, read_bytes, read_json
from rllm.config.yaml_file import read_settings
from rllm.engine.episode_log import task_of
from rllm.errors import ConfigError, StoreError
from rllm.store import open_store, path_of
from rllm.store.base import TraceStore
from rllm.tracking.about import (
    EVALUATION,
    SETTINGS,
    STORE,
    check_contained,
    is_own,
    run_id_of,
    store_of_run,
    way_to_a_run,
)
from rllm.types import JSONObject, StepCredit, Trace
from rllm.viewer.batches import FedBatch, read_batch
from rllm.viewer.charts import Row, rows_of
from rllm.viewer.rollouts import Rollouts, StoredRollout
from rllm.viewer.texts import Vocabulary, message_parts, vocabulary_of

logger = logging.getLogger(__name__)

MARKS = ("metrics.jsonl", SETTINGS, STORE, EVALUATION)
"""Files that identify the folder of a run or an evaluation."""
HOW_TO_MAKE_ONE = (
    "make one with `rllm demo`, which takes a few minutes, or with `rllm train my_agent.py:agent --data tasks.jsonl`"
)
_REPORT = "report.json"
_DIGEST = re.compile(r" \((files|sha256) \w+\)$")
"""Digest after the name of a file or folder in an evaluation's identity."""
_BUSY_S = 120.0
"""Seconds without a new line or trace after which a run counts as stopped."""
_TIMEOUT_S = 5.0


class Accuracy(Struct, kw_only=True):
    """A rate with its 95 % interval."""

    value: float
    low: float
    high: float


class Evaluated(Struct, kw_only=True):
    """Main numbers of a report."""

    num_tasks: int
    num_rollouts: int
    num_failed: int
    accuracy: Accuracy | None = None
    mean_reward: float | None = None


class Run:
    """A run folder, or a trace store without one. Everything is read on demand; thread-safe."""

    def __init__(self, name: str, *, folder: Path | None, store_url: str | None = None) -> None:
        self.name = name
        self.folder = folder
        self._store_url = store_url
        self._metrics: tuple[object, Sequence[Row]] = None, ()
        """Version of the metrics file, and its rows."""
        self._store: TraceStore | None = None
        self._rollouts: Rollouts | None = None
        self._calls = lru_cache(64)(self._read_calls)
        self._question = lru_cache(4096)(self._read_question)
        self._lock = threading.RLock()

    @property
    def config(self) -> JSONObject:
        """Settings, as far as they can be read."""
        path = self.folder / SETTINGS if self.folder else None
        if path is None or not path.is_file():
            return {}
        return _config(path, path.stat().st_mtime_ns)

    def setting(self, *names: str) -> object:
        """Return one setting by section and name, such as `setting("model", "path")`; `None` if it is not set."""
        found: object = self.config
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def rows(self) -> Sequence[Row]:
        """Return the metrics by step; they are read again after the file has changed."""
        if self.folder is None:
            return ()
        path = self.folder / "metrics.jsonl"
        try:
            found = path.stat()
        except OSError:
            return ()
        version = found.st_ino, found.st_size, found.st_mtime_ns
        if self._metrics[0] != version:
            self._metrics = version, rows_of(path)
        return self._metrics[1]

    @property
    def store(self) -> TraceStore:
        """Store of the traces, opened for reading on first use."""
        with self._lock:
            if self._store is None:
                self._store = _opened(self.store_url)
            return self._store

    @property
    def store_url(self) -> str:
        """Path or URL of the traces."""
        if self._store_url or self.folder is None:
            return self._store_url or STORE
        return store_of_run(self.folder) or str(self.folder / STORE)

    @property
    def rollouts(self) -> Rollouts:
        with self._lock:
            run_id = run_id_of(self.folder) if self.folder else None
            if self._rollouts is None or self._rollouts.run_id != run_id:
                self._rollouts = Rollouts(self.store, run_id)
            return self._rollouts

    def calls(self, session_id: str) -> tuple[list[Trace], list[StepCredit]]:
        """Return traces and credits of a session in call order; they are read again after two seconds."""
        return self._calls(session_id, int(time.monotonic() / 2))

    def _read_calls(self, session_id: str, _now: int) -> tuple[list[Trace], list[StepCredit]]:
        traces = sorted(self.store.by_session(session_id), key=lambda trace: trace.started_at)
        return traces, self.store.credits(session_id)

    def question_of(self, rollout: StoredRollout) -> str:
        """Return the question of its first call in one line; empty if it is unknown."""
        step_id = next((step.id for path in rollout.paths for step in path.steps), None)
        return "" if step_id is None else self._question(rollout.session_id, step_id)

    def _read_question(self, session_id: str, trace_id: str) -> str:
        trace = self.store.trace(session_id, trace_id)
        asked = [parts.text for parts in map(message_parts, trace.messages if trace else ()) if parts.kind == "user"]
        return " ".join(asked[-1].split())[:200] if asked else ""

    def task_of(self, rollout: StoredRollout) -> object:
        """Return the task of a rollout; `None` if the folder has no readable one."""
        if self.folder is None:
            return None
        try:
            return task_of(self.folder, rollout.split, rollout.task_id)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def batch(self, step: int) -> FedBatch | None:
        """Return the batch of a step, if the run kept it."""
        return read_batch(self.folder, step) if self.folder else None

    @property
    def model(self) -> str:
        """Folder or hub id of the model, or its name on a server; empty if it is unknown."""
        model = self.setting("model", "path") or self.evaluation.get("model", "")
        return _DIGEST.sub("", model) if isinstance(model, str) else ""

    @property
    def evaluates(self) -> str:
        """Environment or data, agent and sandbox of an evaluation; empty for a training run."""
        about = self.evaluation
        named = (about.get("env") or about.get("dataset"), about.get("agent"), about.get("sandbox"))
        return " · ".join(_DIGEST.sub("", part) for part in named if part)

    @property
    def vocabulary(self) -> Vocabulary:
        named = self.folder is None or is_own(self.folder)
        return vocabulary_of(self.folder, self.model if named and self.model else None)

    @property
    def changed_at(self) -> float:
        """Time of the last write, in Unix seconds; 0 if it is unknown."""
        paths = [self.folder / "metrics.jsonl"] if self.folder else []
        with suppress(ConfigError):  # pages that need the store show the error
            if (database := path_of(self.store_url)) is not None:
                paths += [Path(database).expanduser(), Path(f"{database}-wal").expanduser()]
        return max(map(_changed_at, paths), default=0.0)

    @property
    def evaluated(self) -> Evaluated | None:
        """Last report, if this is the folder of an evaluation and it can be read."""
        if self.folder is None:
            return None
        try:
            return decode(read_bytes(self.folder / _REPORT), type=Evaluated)
        except (OSError, TooLargeError, DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def evaluation(self) -> dict[str, str]:
        """Facts about the evaluation in this folder, such as env, agent, sandbox and model; empty if it has none."""
        if self.folder is None:
            return {}
        try:
            found = read_json(self.folder / EVALUATION).items()
            return {str(name): str(value) for name, value in found if value != "{}"}
        except (OSError, ValueError, AttributeError):
            return {}

    @property
    def is_live(self) -> bool:
        """True if a training run or an evaluation seems to be running: recent writes, and not finished."""
        if self.folder and self.evaluated is not None:
            # An evaluation opens its lock first, and writes its report last.
            report, lock = self.folder / _REPORT, self.folder / ".lock"
            if not (lock.exists() and lock.stat().st_mtime_ns > report.stat().st_mtime_ns):
                return False
        rows, num_steps = self.rows(), self.setting("num_steps")
        is_through = bool(rows) and isinstance(num_steps, int) and rows[-1]["step"] >= num_steps
        return not is_through and time.time() - self.changed_at < _BUSY_S

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = self._rollouts = None


class Runs:
    """Runs in the sources that a user named; new ones are found as they appear."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = list(sources)
        self._runs: dict[str, Run] = {}
        self._left_out: set[Path] = set()
        self._lock = threading.Lock()
        self._found()

    def all(self) -> list[Run]:
        """Return the runs, most recently changed first."""
        return sorted(self._found(), key=lambda run: -run.changed_at)

    def get(self, name: str) -> Run | None:
        """Return the run of this name."""
        return next((run for run in self._found() if run.name == name), None)

    def close(self) -> None:
        """Close all stores."""
        for run in self._runs.values():
            run.close()

    def _found(self) -> list[Run]:
        with self._lock:
            return [run for source in self._sources for run in self._of(source)]

    def _of(self, source: str) -> list[Run]:
        if "://" in source and path_of(source) is None:
            return [self._known("store", folder=None, store_url=source)]
        path = Path(path_of(source) or source).expanduser()
        if path.is_file():
            return [self._known(path.stem, folder=None, store_url=str(path))]
        if not path.is_dir():
            near = way_to_a_run(path, or_evaluation=True)
            raise ConfigError(f"run={source!r}: no such folder; {near}; or {HOW_TO_MAKE_ONE}")
        if _is_run(path):
            check_contained(path)
            return [self._known(path.resolve().name, folder=path)]
        inside = [item for item in sorted(path.glob("*")) if item.is_dir() and _is_run(item)]
        if not inside and any(path.iterdir()):
            raise ConfigError(
                f"run={source!r} is not the folder of a run, nor a folder of runs: it has none of {', '.join(MARKS)}; "
                f"{way_to_a_run(path, or_evaluation=True)}; or {HOW_TO_MAKE_ONE}"
            )
        return [self._known(item.name, folder=item) for item in inside if self._is_contained(item)]

    def _is_contained(self, folder: Path) -> bool:
        try:
            check_contained(folder)
        except ConfigError as error:
            if folder not in self._left_out:
                self._left_out.add(folder)
                logger.warning("left out: %s", error)
            return False
        return True

    def _known(self, name: str, *, folder: Path | None, store_url: str | None = None) -> Run:
        """Return the known run of this place, or a new one with a unique name."""
        place = str(folder.resolve()) if folder else str(store_url)
        if place not in self._runs:
            taken = {run.name for run in self._runs.values()}
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            unique = next(item for item in names if item not in taken)
            self._runs[place] = Run(unique, folder=folder, store_url=store_url)
        return self._runs[place]


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in MARKS)
    except OSError:
        return False  # a folder without read permission


def _changed_at(path: Path) -> float:
    try:
        found = path.stat()
    except OSError:
        return 0.0
    return found.st_mtime if found.st_size else 0.0  # readers create an empty -wal


def _opened(url: str) -> TraceStore:
    if (file := path_of(url)) is not None:
        path = Path(file).expanduser()
        if not path.exists():
            raise StoreError(
                f"there are no traces yet: {str(path)!r} is created with the first rollouts; reload this page then"
            )
        from rllm.store.sqlite import SqliteTraceStore

        return SqliteTraceStore(path, read_only=True, timeout_s=_TIMEOUT_S)
    return open_store(url, read_only=True)


@lru_cache(maxsize=64)
def _config(path: Path, _changed_at: int) -> JSONObject:
    try:
        return read_settings(path)[0]
    except ConfigError:
        return {}  # pages show everything else
