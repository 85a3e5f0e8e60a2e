"""The tracker protocol, the fan-out to several trackers, a thread for slow calls, and `metrics.jsonl`."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import orjson

from rllm._runtime.files import new_file, sync
from rllm.errors import ConfigError, RLLMError
from rllm.registry import resolve
from rllm.tracking import RECORD, TRACKERS
from rllm.types import Episode

logger = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and episodes, constructed with the run's folder; methods of a subclass do nothing by default.

    An optional method `log_rollout(phase, episode)` is called as soon as each rollout of a phase ends.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        return

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a training step; a step may be logged in several parts."""
        return

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """Log the episodes that the metrics of this step come from; `split` is `train` or `eval`."""
        return

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report progress within a phase: `evaluate`, `roll out`, `update`."""
        return

    def close(self) -> None:
        """Write what is pending. Repeatable."""
        return


def checked_trackers(trackers: Iterable[object]) -> list[Tracker]:
    """Return the trackers that a user passed; raise `ConfigError` if one is not a tracker, such as the name of one."""
    found = [trackers] if isinstance(trackers, str) else list(trackers)
    for tracker in found:
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise ConfigError(
                f"trackers={trackers!r}: pass objects with the methods log, log_episodes, progress and close; "
                "select trackers by name in the configuration, such as trackers=[console,wandb]"
            )
    return [tracker for tracker in found if isinstance(tracker, Tracker)]


class Trackers:
    """Several trackers as one.

    A failure at the start stops the run; a tracker that fails later is dropped and logged.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = [(type(tracker).__name__, tracker) for tracker in trackers]

    @classmethod
    def start(cls, names: Sequence[str], run_dir: Path, extra: Sequence[Tracker] = ()) -> Trackers:
        """Start the named trackers and add the `extra` ones; `metrics.jsonl` is always written.

        Raises:
            ConfigError: if a name is unknown, or its tracker cannot start.
            MissingDependencyError: naming the extra that installs what it needs.
        """
        started = cls(extra)
        try:
            for name in dict.fromkeys([RECORD, *names]):
                started._trackers.append((name, _start(name, run_dir)))
        except BaseException:
            started.close()
            raise
        return started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_each(lambda tracker: tracker.log(step, metrics))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        self._call_each(lambda tracker: tracker.log_episodes(step, split, episodes))

    def progress(self, phase: str, done: int, total: int, episode: Episode | None = None) -> None:
        """Report progress; `episode` is the one that has just ended, for trackers with a method `log_rollout`."""
        if episode is not None:
            self._call_each(lambda tracker: getattr(tracker, "log_rollout", lambda *_: None)(phase, episode))
        self._call_each(lambda tracker: tracker.progress(phase, done, total))

    def close(self) -> None:
        self._call_each(lambda tracker: tracker.close())

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for named in list(self._trackers):
            name, tracker = named
            try:
                call(tracker)
            except Exception as error:  # code of other projects, which must not end the run
                logger.warning("tracker %s failed and is no longer used: %s: %s", name, type(error).__name__, error)
                logger.debug("traceback of the tracker", exc_info=error)
                self._trackers.remove(named)


def _start(name: str, run_dir: Path) -> Tracker:
    make = resolve(name, TRACKERS, kind="trackers")
    try:
        tracker: Tracker = make(run_dir)
    except RLLMError:
        raise
    except Exception as error:
        raise ConfigError(
            f"trackers={name!r} cannot start: {type(error).__name__}: {error}; fix that, or remove it from trackers"
        ) from error
    return tracker


MAX_WAITING = 1000
"""Calls that may wait; a tracker with more is dropped."""
CLOSE_S = 30.0
"""Seconds to wait for them at the end of a run."""

_END = None


class Background:
    """Thread that makes calls in order. An error in it is raised at the next `do` or `close`."""

    def __init__(self, name: str, *, max_waiting: int = MAX_WAITING, close_s: float = CLOSE_S) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(max_waiting)
        self._close_s = close_s
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Queue a call."""
        self._raise_error()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise RLLMError(f"the tracker does not keep up: {self._calls.qsize()} calls are waiting") from None

    def close(self) -> None:
        """Wait until all calls are made. Repeatable."""
        if self._thread.is_alive():
            self.do(lambda: None)
            with suppress(queue.Full):  # the join below then times out, too
                self._calls.put(_END, timeout=self._close_s)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                raise RLLMError(
                    f"the tracker did not finish within {self._close_s:g} s; {self._calls.qsize()} calls are lost"
                )
        self._raise_error()

    def _work(self) -> None:
        while self._error is None and (call := self._calls.get()) is not _END:
            try:
                call()
            except Exception as error:  # raised by the next call, in the caller's thread
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


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
