from __future__ import annotations

import itertools
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from rllm.errors import CheckpointError, ConfigError, WorkerError
from rllm.inference.local.loading import save_tokenizer
from rllm.testing.tiny_policy import train_tokenizer
from rllm.tracking.about import in_use
from rllm.trainer.checkpoint import STATE_FILE, Checkpoints, damage_of, read_state, score_of


def write(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return fill


def crash(folder: Path) -> None:
    (folder / "weights").write_text("half of th")
    raise KeyboardInterrupt


def test_checkpoint_holds_the_written_files_and_the_state(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path, keep=2).save(20, write("w"), {"config": {"seed": 3}})
    assert folder == tmp_path / "checkpoints" / "step-000020"
    assert (folder / "weights").read_text() == "w"
    assert read_state(folder) == {"step": 20, "config": {"seed": 3}, "files": {"weights": 1}}


def test_crash_while_writing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    first = checkpoints.save(1, write("one"), {})
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, crash, {})
    assert Checkpoints(tmp_path, keep=2).latest() == first


def test_remains_of_a_crash_are_removed_by_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1, crash, {})
    latest = checkpoints.save(2, write("two"), {})
    assert list((tmp_path / "checkpoints").iterdir()) == [latest]


class Crash(BaseException):
    """Simulated end of the process."""


class Crashing:
    """Simulation of a crash at the n-th use of the file system; the interpreter's audit hook counts the uses."""

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._count)

    def _count(self, event: str, args: object) -> None:
        if self.left is not None and (event == "open" or event.startswith(("os.", "shutil."))):
            self.left -= 1
            if self.left < 0:
                raise Crash

    def crashes(self, at: int, work: Callable[[], object]) -> bool:
        self.left = at
        try:
            work()
        except Crash:
            return True
        finally:
            self.left = None
        return False


def test_crash_during_a_save_leaves_complete_checkpoints(tmp_path: Path) -> None:
    crashing = Crashing()
    for moment in itertools.count():
        run_dir = tmp_path / str(moment)
        checkpoints = Checkpoints(run_dir, keep=1, keep_best="eval/reward")
        for step in (1, 2):
            checkpoints.save(step, write("abc"), {"score": -step})
        crashed = crashing.crashes(moment, lambda: checkpoints.save(3, write("abc"), {"score": 0}))  # noqa: B023
        assert [damage_of(folder) for folder in checkpoints.all()] == [None] * len(checkpoints.all())
        assert (newest := checkpoints.latest()) is not None
        assert newest.name in ("step-000002", "step-000003")
        if not crashed:
            break
        assert checkpoints.save(4, write("abc"), {}) == checkpoints.latest()
        assert not list(run_dir.rglob("*.partial"))
    assert moment > 20
    assert newest.name == "step-000003"


def test_full_disk_is_reported_and_damages_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = checkpoints.save(1, write("one"), {})
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    fills: list[Callable[[Path], object]] = [
        write("x" * 2000),
        lambda folder: torch.save(torch.zeros(2000), folder / "weights"),
        partial(save_tokenizer, tokenizer),
    ]
    try:
        for fill in fills:
            with pytest.raises(CheckpointError, match=r"step 2 cannot be written .* step-000001 is complete"):
                checkpoints.save(2, fill, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list((tmp_path / "checkpoints").iterdir()) == [first], "no partial checkpoint is left"
    assert damage_of(first) is None


@pytest.mark.parametrize("error", [SafetensorError, WorkerError])
def test_unwritable_weights_are_reported(tmp_path: Path, error: type[Exception]) -> None:
    def fail(folder: Path) -> None:
        raise error("no room")

    with pytest.raises(CheckpointError, match=rf"step 1 cannot be written .* \({error.__name__}: no room\)"):
        Checkpoints(tmp_path, keep=1).save(1, fail, {})


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="there is none before it"):
        Checkpoints(tmp_path, keep=1).save(1, write(""), {})
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be used"), in_use(tmp_path):
        pass


def test_folder_without_state_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.save(1, write("one"), {}) / STATE_FILE).unlink()
    assert checkpoints.latest() is None


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, write(str(step)), {})
    assert [folder.name for folder in checkpoints.all()] == ["step-000002", "step-000003"]


def test_newest_is_the_one_with_most_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (999_999, 1_000_000):
        newest = checkpoints.save(step, write(""), {})
    assert checkpoints.latest() == newest


def test_step_saved_again_has_only_the_new_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, write("old"), {"score": None})
    folder = checkpoints.save(1, crash, {"score": 0.5})
    assert (folder / "weights").read_text() == "old"
    assert read_state(folder)["score"] == 0.5
    assert checkpoints.all() == [folder]


def test_files_in_subfolders_are_flushed_and_listed(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "critic").mkdir()
        (folder / "critic" / "weights").write_text("abc")

    assert read_state(Checkpoints(tmp_path, keep=1).save(1, fill, {}))["files"] == {"critic/weights": 3}


def test_best_checkpoint_is_kept_with_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best="eval/reward")
    assert checkpoints.best_score() is None
    assert checkpoints.best() is None
    for step, score in enumerate((0.25, 0.75, 0.5, None, 0.75), start=1):
        checkpoints.save(step, write(""), {"score": score})
    assert [folder.name for folder in checkpoints.all()] == ["step-000002", "step-000005"]
    assert checkpoints.best() == checkpoints.all()[0], "the earliest of equal checkpoints is the best"
    assert checkpoints.best_score() == 0.75


def test_score_of_an_evaluation_is_its_chosen_metric() -> None:
    metrics = {"eval/accuracy": 0.5, "eval/reward": 2.0}
    assert score_of(metrics, None) is None
    assert score_of(metrics, "eval/reward") == 2.0
    assert score_of(metrics, "-eval/reward") == -2.0, "lower is better"
    assert score_of(metrics, "eval/reward/judge", is_known=True) is None, "the role has no score this time"
    assert score_of({"eval/loss": float("nan")}, "-eval/loss") is None, "nan would stay the best forever"
    with pytest.raises(ConfigError, match="is not a metric of evaluations: use one of eval/accuracy, eval/reward"):
        score_of(metrics, "eval/acuracy")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "message"),
    [(cut, "weights has 2 bytes instead of 3"), (Path.unlink, "weights is missing")],
)
def test_damaged_checkpoint_error_names_the_previous_one(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    folders = [checkpoints.save(step, write("abc"), {}) for step in (1, 2, 3)]
    for folder in folders[1:]:
        harm(folder / "weights")
    with pytest.raises(ConfigError, match=message):
        read_state(folders[2])
    assert checkpoints.way_back(folders[2]).startswith(f"delete this folder to resume from '{folders[0]}'")
    assert "no complete checkpoint before it" in checkpoints.way_back(folders[0])


@pytest.mark.parametrize("state", ['{"global_step": 7}', "[7]"])
def test_state_of_another_program_is_rejected(tmp_path: Path, state: str) -> None:
    (tmp_path / STATE_FILE).write_text(state)
    with pytest.raises(ConfigError, match="is not a checkpoint of rllm"):
        read_state(tmp_path)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoints" / "my-step-000009"
    mine.mkdir(parents=True)
    (mine / STATE_FILE).write_text("{}")
    checkpoints = Checkpoints(tmp_path, keep=1)
    latest = checkpoints.save(1, write(""), {})
    assert checkpoints.all() == [latest]
    assert mine.exists()


def test_folder_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=1).latest() is None


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_unreadable_state_is_reported(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"no readable {STATE_FILE}"):
        read_state(tmp_path)
