from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from rllm.errors import ConfigError, MissingDependencyError
from rllm.tracking import EXTRAS
from rllm.tracking.about import evaluations_of
from rllm.tracking.base import JSONLTracker, Tracker, Trackers, checked_trackers, forget_after
from rllm.types import Episode


class Notes:
    """A tracker that records its calls, and fails on request."""

    def __init__(self, run_dir: Path | None = None, *, failing: str = "") -> None:
        self.calls: list[object] = []
        self.failing = failing

    def _record(self, name: str, what: object) -> None:
        if name == self.failing:
            raise OSError("the server is gone")
        self.calls.append(what)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record("log", (step, dict(metrics)))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        self._record("log_episodes", (split, len(episodes)))

    def progress(self, phase: str, done: int, total: int) -> None:
        self._record("progress", (phase, done, total))

    def close(self) -> None:
        self._record("close", "closed")


class Broken(Notes):
    def __init__(self, run_dir: Path) -> None:
        raise ConnectionError("no such project")


def lines_of(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Reject data beyond a limit, as on a full disk, even half a line."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_all_trackers_get_all_calls() -> None:
    one, other = Notes(), Notes()
    trackers = Trackers([one, other])
    trackers.log(1, {"a": 2.0})
    trackers.log_episodes(1, "eval", [Episode(task_id="t")])
    trackers.progress("update", 0, 1)
    trackers.close()
    assert one.calls == other.calls == [(1, {"a": 2.0}), ("eval", 1), ("update", 0, 1), "closed"]


@pytest.mark.parametrize("failing", ["log", "log_episodes", "progress", "close"])
def test_failing_tracker_is_reported_and_removed(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Notes(failing=failing), Notes()
    trackers = Trackers([bad, good])
    for _ in range(2):
        trackers.log(1, {})
        trackers.log_episodes(1, "train", [])
        trackers.progress("update", 0, 1)
        trackers.close()
    assert [record.message for record in caplog.records] == [
        "tracker Notes failed and is no longer used: OSError: the server is gone"
    ]
    assert len(good.calls) == 8


def test_ctrl_c_is_not_a_failure_of_the_tracker() -> None:
    class Stopping(Notes):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers([Stopping()]).log(1, {})


class Counting(Tracker):
    logged: ClassVar[list[int]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append(step)


def test_subclass_of_tracker_needs_only_the_methods_that_it_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers.start([f"{__name__}:Counting"], tmp_path, checked_trackers([Counting()]))
    trackers.log(1, {"a": 2.0})
    trackers.log_episodes(1, "eval", [Episode(task_id="t")])
    trackers.progress("update", 0, 1, Episode(task_id="t"))
    trackers.close()
    assert Counting.logged == [1, 1]
    assert not caplog.records


def test_trackers_are_created_by_name_with_the_run_folder(tmp_path: Path) -> None:
    trackers = Trackers.start(["jsonl"], tmp_path, [extra := Notes()])
    trackers.log(3, {"x": 1.0})
    trackers.close()
    assert lines_of(tmp_path) == [{"step": 3, "x": 1.0}]
    assert extra.calls == [(3, {"x": 1.0}), "closed"]


@pytest.mark.parametrize("names", [[], ["console"], ["console", "jsonl"]])
def test_metrics_file_is_always_written(tmp_path: Path, names: list[str]) -> None:
    trackers = Trackers.start(names, tmp_path)
    trackers.log(3, {"x": 1.0})
    trackers.close()
    assert lines_of(tmp_path) == [{"step": 3, "x": 1.0}]


def test_metrics_file_continues_after_a_failed_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers.start(["jsonl"], tmp_path)
    trackers.log(1, {"x": 1.0})
    with no_file_larger_than((tmp_path / "metrics.jsonl").stat().st_size + 5):
        trackers.log(2, {"x": 2.0})
        trackers.log(3, {"x": 3.0})
    trackers.log(4, {"x": 4.0})
    trackers.close()
    trackers.close()
    assert lines_of(tmp_path) == [{"step": step, "x": float(step)} for step in (1, 2, 3, 4)]
    assert [record.message.partition("metrics.jsonl: ")[2] for record in caplog.records] == [
        f"step {step} could not be written; it is written with the next one: [Errno 27] File too large"
        for step in (2, 3)
    ]


def test_lost_lines_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = JSONLTracker(tmp_path)
    with no_file_larger_than(5):
        tracker.log(1, {"x": 1.0})
        tracker.close()
        tracker.close()
    assert [record.message.partition("metrics.jsonl: ")[2] for record in caplog.records] == [
        "step 1 could not be written; it is written with the next one: [Errno 27] File too large",
        "the last lines could not be written: [Errno 27] File too large",
    ]


def test_tracker_that_cannot_start_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Broken' cannot start: ConnectionError: no such project; fix that, or remove it"
    ):
        Trackers.start(["jsonl", f"{__name__}:Broken"], tmp_path)


def test_misspelt_tracker_name_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trackers='jsnl' is not known: did you mean 'jsonl'"):
        Trackers.start(["jsnl"], tmp_path)


@pytest.mark.parametrize("given", ["wandb", ["wandb"], [Notes], [object()]])
def test_non_tracker_is_rejected(given: object) -> None:
    with pytest.raises(
        ConfigError, match=r"trackers=.*: pass objects with the methods log, .* such as trackers=\[console,wandb\]"
    ):
        checked_trackers(given)
    notes = Notes()
    assert checked_trackers((notes,)) == [notes]


def test_json_lines_are_appended_and_flushed(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JSONLTracker(tmp_path)
        tracker.log(step, {"a/b": 0.5})
        assert lines_of(tmp_path)[-1] == {"step": step, "a/b": 0.5}
        tracker.close()
        tracker.close()
    assert len(lines_of(tmp_path)) == 2


def test_non_finite_values_are_null_in_json(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": np.float64(1.5)})  # type: ignore[dict-item]
    tracker.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert lines_of(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.5}]


def test_resumed_run_drops_later_steps_and_a_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step":0}\n{"step":20,"a":1}\n{"step":21}\n{"step":20,"dropped/zu groß'.encode()[:-1])
    forget_after(path, 20)
    assert path.read_text() == '{"step":0}\n{"step":20,"a":1}\n'
    forget_after(path, -1)
    assert path.read_text() == ""


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path)
    tracker.log(1, {"dropped/odd\u2028reason\x85": 1.0})
    tracker.close()
    forget_after(tmp_path / "metrics.jsonl", 1)
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 1
    assert evaluations_of(tmp_path) == []


def test_dropping_steps_of_a_missing_file_does_nothing(tmp_path: Path) -> None:
    forget_after(tmp_path / "metrics.jsonl", 3)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", EXTRAS)
def test_missing_package_error_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(
        MissingDependencyError, match=rf"trackers={name} needs the package.*pip install 'rllm\[{name}\]'"
    ):
        Trackers.start(["jsonl", name], tmp_path)
