"""The tracker protocol, and the fan-out to several trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from rllm.errors import ConfigError, RLLMError
from rllm.registry import resolve
from rllm.tracking import RECORD, TRACKERS
from rllm.types import Episode

logger = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and episodes, constructed with the run's folder.

    An optional method `log_rollout(phase, episode)` is called as soon as each rollout of a phase ends.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a training step; a step may be logged in several parts."""
        ...

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """Log the episodes that the metrics of this step come from; `split` is `train` or `eval`."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report progress within a phase: `evaluate`, `roll out`, `update`."""
        ...

    def close(self) -> None:
        """Write what is pending. Repeatable."""
        ...


def checked_trackers(trackers: Iterable[object]) -> list[Tracker]:
    """Return the trackers that a user passed.

    Raises:
        ConfigError: if one is not a tracker, such as the name of one.
    """
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
        """Start the named trackers beside the `extra` ones; `metrics.jsonl` is always written.

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
            self._call_each(lambda tracker: getattr(tracker, "log_rollout", _ignore_rollout)(phase, episode))
        self._call_each(lambda tracker: tracker.progress(phase, done, total))

    def close(self) -> None:
        self._call_each(lambda tracker: tracker.close())

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for named in list(self._trackers):
            name, tracker = named
            try:
                call(tracker)
            except Exception as error:  # foreign code: training is worth more than a chart
                logger.warning("tracker %s failed and is not used any more: %s: %s", name, type(error).__name__, error)
                logger.debug("traceback of the tracker", exc_info=error)
                self._trackers.remove(named)


def _ignore_rollout(phase: str, episode: Episode) -> None:
    """Stand in for the method of trackers that lack it."""


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
