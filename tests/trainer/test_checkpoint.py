from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.trainer.checkpoint import STATE_FILE, Checkpoints, read_state


def write(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return fill


def crash(folder: Path) -> None:
    (folder / "weights").write_text("half of th")
    raise KeyboardInterrupt


def test_a_checkpoint_holds_what_was_written_and_the_state(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path, keep=2).save(20, write("w"), {"config": {"seed": 3}})
    assert folder == tmp_path / "checkpoints" / "step-000020"
    assert (folder / "weights").read_text() == "w"
    assert read_state(folder) == {"step": 20, "config": {"seed": 3}}


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    first = checkpoints.save(1, write("one"), {})
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, crash, {})
    assert Checkpoints(tmp_path, keep=2).latest() == first


def test_what_a_crash_left_is_cleared_away_by_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1, crash, {})
    latest = checkpoints.save(2, write("two"), {})
    assert list((tmp_path / "checkpoints").iterdir()) == [latest]


def test_a_folder_without_its_state_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.save(1, write("one"), {}) / STATE_FILE).unlink()
    assert checkpoints.latest() is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, write(str(step)), {})
    assert [folder.name for folder in checkpoints.all()] == ["step-000002", "step-000003"]


def test_newest_means_most_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (999_999, 1_000_000):
        newest = checkpoints.save(step, write(""), {})
    assert checkpoints.latest() == newest


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, write("old"), {})
    assert (checkpoints.save(1, write("new"), {}) / "weights").read_text() == "new"
    assert len(checkpoints.all()) == 1


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoints" / "my-step-000009"
    mine.mkdir(parents=True)
    (mine / STATE_FILE).write_text("{}")
    checkpoints = Checkpoints(tmp_path, keep=1)
    latest = checkpoints.save(1, write(""), {})
    assert checkpoints.all() == [latest]
    assert mine.exists()


def test_no_checkpoints_yet(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=1).latest() is None


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_a_state_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"no readable {STATE_FILE}"):
        read_state(tmp_path)
