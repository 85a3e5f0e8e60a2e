"""What a tracker does, and the fan-out to several of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rllm.errors import ConfigError, RLLMError
from rllm.registry import resolve
from rllm.tracking import RECORD, TRACKERS
from rllm.types import Episode

logger = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Receives what a run has to say. Made with the run's folder.

    It may also have `log_rollout(phase, episode)`, which is called as soon as each rollout of a phase ends.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a training step; a step may be logged in several parts."""
        ...

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """The episodes that the metrics of this step were taken from; `split` is `train` or `eval`."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far the current phase is: `evaluate`, `roll out`, `update`."""
        ...

    def close(self) -> None:
        """Write what is left. Repeatable."""
        ...


def checked_trackers(trackers: Any) -> list[Tracker]:
    """
    Raises:
        ConfigError: for what is no tracker, such as the name of one.
    """
    for tracker in [trackers] if isinstance(trackers, str) else trackers:
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise ConfigError(
                f"trackers={trackers!r}: give objects with the methods log, log_episodes, progress and close; trackers that have "
                "names are set in the configuration, such as trackers=[console,wandb]"
            )
    return list(trackers)


class Trackers:
    """Several trackers as one. One that fails at its start stops the run; one that fails later is dropped, and named."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = [(type(tracker).__name__, tracker) for tracker in trackers]

    @classmethod
    def start(cls, names: Sequence[str], run_dir: Path, extra: Sequence[Tracker] = ()) -> Trackers:
        """The named trackers, started, and `extra` ones; `metrics.jsonl`, which other commands read, is always written.

        Raises:
            ConfigError: if a name is not known, or its tracker cannot start.
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
        self._tell(lambda tracker: tracker.log(step, metrics))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        self._tell(lambda tracker: tracker.log_episodes(step, split, episodes))

    def progress(self, phase: str, done: int, total: int, episode: Episode | None = None) -> None:
        """Note how far a phase is; `episode` is the one that has just ended, for trackers with a method `log_rollout`."""
        if episode is not None:
            self._tell(lambda tracker: getattr(tracker, "log_rollout", _unheard)(phase, episode))
        self._tell(lambda tracker: tracker.progress(phase, done, total))

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        for told in list(self._trackers):
            name, tracker = told
            try:
                tell(tracker)
            except Exception as error:  # a tracker is somebody else's code, and training is worth more than a chart
                logger.warning(
                    "tracker %s failed, and is left out from here on: %s: %s", name, type(error).__name__, error
                )
                logger.debug("the tracker's traceback", exc_info=error)
                self._trackers.remove(told)


def _unheard(phase: str, episode: Episode) -> None:
    """What a tracker without `log_rollout` does."""


def _start(name: str, run_dir: Path) -> Tracker:
    make = resolve(name, TRACKERS, kind="trackers")
    try:
        tracker: Tracker = make(run_dir)
    except RLLMError:
        raise
    except Exception as error:
        raise ConfigError(
            f"trackers={name!r} cannot start: {type(error).__name__}: {error}; mend that, or leave it out of trackers"
        ) from error
    return tracker
