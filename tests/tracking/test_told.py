"""What a tracker that takes nothing back is told by a run that was killed and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllm.tracking.about import forget_trackers, kept_id
from rllm.tracking.told import Told


def tell(told: Told, step: int, **values: float) -> Any:
    heard: list[dict[str, float]] = []
    told.once(step, values, heard.append)
    return heard[0] if heard else None


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that told three steps and one evaluation."""
    told = Told(tmp_path, "notes")
    for step in (1, 2, 3):
        assert tell(told, step, reward=0.5) == {"reward": 0.5}
    assert tell(told, 2, accuracy=1.0) == {"accuracy": 1.0}
    return tmp_path


def test_a_process_may_tell_a_step_in_several_parts(tmp_path: Path) -> None:
    told = Told(tmp_path, "notes")
    assert tell(told, 1, reward=0.5) == tell(told, 1, reward=0.5) == {"reward": 0.5}


def test_what_an_earlier_process_told_is_left_out(killed: Path) -> None:
    again = Told(killed, "notes")
    assert tell(again, 2, reward=0.5, accuracy=1.0) is None
    assert tell(again, 3, reward=0.5, accuracy=0.75) == {"accuracy": 0.75}
    assert tell(again, 4, reward=0.25) == {"reward": 0.25}


def test_what_never_arrived_is_told_again(killed: Path) -> None:
    again = Told(killed, "notes", arrived=2)
    assert tell(again, 2, reward=0.5) is None
    assert tell(again, 3, reward=0.5) == {"reward": 0.5}


def test_what_the_tracker_did_not_take_is_told_again(tmp_path: Path) -> None:
    def refuse(values: object) -> None:
        raise OSError("the server is gone")

    with pytest.raises(OSError, match="gone"):
        Told(tmp_path, "notes").once(1, {"reward": 0.5}, refuse)
    assert tell(Told(tmp_path, "notes"), 1, reward=0.5) == {"reward": 0.5}


def test_a_run_that_begins_again_from_nothing_tells_everything(killed: Path) -> None:
    assert kept_id(killed, "notes", lambda: "first") == "first"
    forget_trackers(killed)
    assert kept_id(killed, "notes", lambda: "second") == "second"
    assert tell(Told(killed, "notes"), 1, reward=0.5) == {"reward": 0.5}


def test_a_run_that_begins_in_a_folder_of_other_programs_leaves_their_events(tmp_path: Path) -> None:
    theirs = tmp_path / "tensorboard" / "events.out.tfevents.1.theirs"
    theirs.parent.mkdir()
    theirs.touch()
    forget_trackers(tmp_path)
    assert theirs.exists()
    assert tell(Told(tmp_path, "tensorboard"), 1, reward=0.5) == {"reward": 0.5}
    forget_trackers(tmp_path)
    assert not theirs.exists()
