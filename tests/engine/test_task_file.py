"""What a run keeps of its tasks is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rllm.engine.episode_log import EpisodeLog
from rllm.engine.task_file import TaskFile, plain_task_id, read_tasks, task_of
from rllm.types import Episode


def test_every_task_is_kept_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    for step in (0, 1):
        file = TaskFile(tmp_path)
        for index in (0, 1):
            file.log_episodes(step, "train", [Episode(task_id=f"a@{step}.0.0", index=index, task={"q": "fig"})])
        file.log_episodes(step, "eval", [Episode(task_id="a", task={"q": "lime"})])
        file.close()
    assert read_tasks(tmp_path) == {("train", "a"): {"q": "fig"}, ("eval", "a"): {"q": "lime"}}
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 2


def test_a_line_that_was_cut_off_is_no_task(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"split":"train","task_id":"a","task":1}\n{"split":"tr')
    assert read_tasks(tmp_path) == {("train", "a"): 1}
    file = TaskFile(tmp_path)  # and what a resumed run writes does not run into it
    file.log_episodes(0, "train", [Episode(task_id="b", task=2)])
    file.close()
    assert read_tasks(tmp_path) == {("train", "a"): 1, ("train", "b"): 2}


def test_one_task_is_found_by_its_split_and_id(tmp_path: Path) -> None:
    assert task_of(tmp_path, "train", "a") is None
    with EpisodeLog(tmp_path / "episodes.jsonl") as evaluation:
        evaluation.append(Episode(task_id="a", task={"q": "plum"}))
    assert task_of(tmp_path, "eval", "a") == {"q": "plum"}
    lines = ['{"split":"eval","task_id":"a","task":"b"}', '{"split":"train","task_id":"b","task":2}', '{"split":"tr']
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    assert task_of(tmp_path, "train", "b@0.1.2") == 2
    assert task_of(tmp_path, "eval", "a") == "b"
    assert task_of(tmp_path, "eval", "b") is None


@pytest.mark.parametrize(
    ("task_id", "plain"), [("a@3.0.12", "a"), ("me@home", "me@home"), ("a@1.2.3@4.0.0", "a@1.2.3")]
)
def test_the_place_of_a_task_is_no_part_of_its_id(task_id: str, plain: str) -> None:
    assert plain_task_id(task_id) == plain
