"""Logging by a run that was killed and resumed, to a tracker that cannot remove anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllm.tracking.about import LoggedSteps, forget_trackers, kept_id


def log(logged: LoggedSteps, step: int, **values: float) -> Any:
    received: list[dict[str, float]] = []
    logged.log_new(step, values, received.append)
    return received[0] if received else None


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that logged three steps and one evaluation."""
    logged = LoggedSteps(tmp_path, "notes")
    for step in (1, 2, 3):
        assert log(logged, step, reward=0.5) == {"reward": 0.5}
    assert log(logged, 2, accuracy=1.0) == {"accuracy": 1.0}
    return tmp_path


def test_step_may_be_logged_in_several_parts(tmp_path: Path) -> None:
    logged = LoggedSteps(tmp_path, "notes")
    assert log(logged, 1, reward=0.5) == log(logged, 1, reward=0.5) == {"reward": 0.5}


def test_steps_of_an_earlier_process_are_skipped(killed: Path) -> None:
    again = LoggedSteps(killed, "notes")
    assert log(again, 2, reward=0.5, accuracy=1.0) is None
    assert log(again, 3, reward=0.5, accuracy=0.75) == {"accuracy": 0.75}
    assert log(again, 4, reward=0.25) == {"reward": 0.25}


def test_steps_that_were_not_received_are_logged_again(killed: Path) -> None:
    again = LoggedSteps(killed, "notes", arrived=2)
    assert log(again, 2, reward=0.5) is None
    assert log(again, 3, reward=0.5) == {"reward": 0.5}


def test_values_rejected_by_a_tracker_are_logged_again(tmp_path: Path) -> None:
    def refuse(values: object) -> None:
        raise OSError("the server is gone")

    with pytest.raises(OSError, match="gone"):
        LoggedSteps(tmp_path, "notes").log_new(1, {"reward": 0.5}, refuse)
    assert log(LoggedSteps(tmp_path, "notes"), 1, reward=0.5) == {"reward": 0.5}


def test_restarted_run_logs_everything(killed: Path) -> None:
    assert kept_id(killed, "notes", lambda: "first") == "first"
    forget_trackers(killed)
    assert kept_id(killed, "notes", lambda: "second") == "second"
    assert log(LoggedSteps(killed, "notes"), 1, reward=0.5) == {"reward": 0.5}


def test_events_of_other_programs_are_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "tensorboard" / "events.out.tfevents.1.theirs"
    theirs.parent.mkdir()
    theirs.touch()
    forget_trackers(tmp_path)
    assert theirs.exists()
    assert log(LoggedSteps(tmp_path, "tensorboard"), 1, reward=0.5) == {"reward": 0.5}
    forget_trackers(tmp_path)
    assert not theirs.exists()
