"""Episodes and tasks as lines of files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rllm.engine.episode_log import EpisodeLog, TaskFile, plain_task_id, read_tasks, task_of
from rllm.errors import StoreError
from rllm.store.codec import readable_json
from rllm.types import Episode, Step, TerminationReason, Trajectory, is_scored


def episode(index: int = 0, **fields: Any) -> Episode:
    step = Step(id="call-1", prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], model_response="four")
    trajectory = Trajectory(uid="u", name="solver", steps=[step], reward=1.0)
    return Episode(task={"question": "2+2"}, task_id="t", index=index, trajectories=[trajectory], **fields)


def test_written_episodes_are_read_back(tmp_path):
    written = [
        episode(0, is_correct=True, metrics={"timing/rollout_s": 0.5}),
        Episode(
            task_id="t",
            index=1,
            termination_reason=TerminationReason.ERROR,
            info={"error": {"type": "AgentError", "message": "no", "traceback": ""}},
        ),
    ]
    with EpisodeLog(tmp_path / "new folder" / "episodes.jsonl") as log:
        for item in written:
            log.append(item)
        read = list(EpisodeLog.read(log.path))  # while it is open: nothing is buffered
    assert read == written
    assert read[0].trajectories[0].steps[0].response_ids == [3]
    assert not is_scored(read[0].trajectories[0].steps[0].reward)
    assert read[1].failed


def test_second_log_continues_the_first(tmp_path):
    path = tmp_path / "episodes.jsonl"
    for index in range(2):
        with EpisodeLog(path) as log:
            log.append(episode(index))
    assert [item.index for item in EpisodeLog.read(path)] == [0, 1]


def test_missing_file_has_no_episodes(tmp_path):
    assert list(EpisodeLog.read(tmp_path / "none.jsonl")) == []


def test_token_ids_can_be_left_to_the_trace_store(tmp_path):
    with EpisodeLog(tmp_path / "e.jsonl", tokens=False) as log:
        kept = episode()
        log.append(kept)
    assert kept.trajectories[0].steps[0].prompt_ids == [1, 2]
    [step] = next(EpisodeLog.read(log.path)).trajectories[0].steps
    assert (step.id, step.prompt_ids, step.response_ids, step.logprobs) == ("call-1", [], [], [])
    assert step.model_response == "four"


@pytest.mark.parametrize("torn", [b'{"id": "t:1", "tas', b"x" * 200_000])
def test_truncated_last_line_is_skipped_and_removed_before_writing(tmp_path, torn):
    path = tmp_path / "episodes.jsonl"
    with EpisodeLog(path) as log:
        log.append(episode(0))
    with path.open("ab") as file:
        file.write(torn)
    assert [item.index for item in EpisodeLog.read(path)] == [0]
    with EpisodeLog(path) as log:
        log.append(episode(1))
    assert [item.index for item in EpisodeLog.read(path)] == [0, 1]


def test_file_with_only_a_truncated_line_is_emptied(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"id"')
    EpisodeLog(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{}}", "[1]", '{"id": "t:0", "colour": 1}', '{"termination_reason": "boredom"}'])
def test_invalid_line_is_reported(tmp_path, line):
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(Episode(id="t:0").to_dict()) + "\n" + line + "\n")
    with pytest.raises(StoreError, match=r"episodes.jsonl, line 2 is not an episode"):
        list(EpisodeLog.read(path))


def test_unwritable_path_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written to '.*e\.jsonl'"):
        EpisodeLog(tmp_path / "file" / "e.jsonl")


def test_appended_episodes_survive_kill_9(tmp_path):
    path = tmp_path / "episodes.jsonl"
    program = (
        "import sys, time\n"
        "from rllm.engine.episode_log import EpisodeLog\n"
        "from rllm.types import Episode\n"
        f"log = EpisodeLog({str(path)!r})\n"
        "for index in range(3): log.append(Episode(task_id='t', index=index))\n"
        "print('done', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [item.index for item in EpisodeLog.read(path)] == [0, 1, 2]


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Board:
    cells: Any


class Stubborn:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def tolist(self) -> list[int]:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (np.arange(3), [0, 1, 2]),
        (np.arange(6).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]]),  # not contiguous
        (np.float32(0.5), 0.5),
        (np.array(["a"]), ["a"]),
        (Path("a/b"), "a/b"),
        ({1}, [1]),
        (Point(1, 2), [1, 2]),
        (Board(np.zeros(1)), {"cells": [0.0]}),
        (float("nan"), None),
        ({1: "a", (2, 3): "b"}, {"1": "a", "(2, 3)": "b"}),
        ("\ud800", "\\ud800"),
        ({"\ud800": [np.int64(1), "fine"]}, {"\\ud800": [1, "fine"]}),
        (10**30, str(10**30)),
        (b"bytes", "b'bytes'"),
        (KeyError("a"), "'a'"),
        ([10**30, object], [str(10**30), "<class 'object'>"]),
    ],
)  # fmt: skip
def test_unserializable_values_become_the_closest_json(tmp_path, value, seen):
    with EpisodeLog(tmp_path / "e.jsonl") as log:
        log.append(Episode(id="t:0", info={"value": value}))
    assert next(EpisodeLog.read(log.path)).info == {"value": seen}


def test_no_value_of_an_agent_raises_an_error(tmp_path):
    circle: list[Any] = []
    circle.extend([circle, circle])
    with EpisodeLog(tmp_path / "e.jsonl") as log:
        log.append(Episode(id="t:0", info={"circle": circle, "stubborn": Stubborn(), "huge": 10**5000}))
    info = next(EpisodeLog.read(log.path)).info
    assert info == {"circle": ["<list>", "<list>"], "stubborn": "<Stubborn>", "huge": "<int>"}


def test_equal_values_have_equal_json():
    assert (
        readable_json({"b": 1, "a": [2]}, sort_keys=True)
        == readable_json({"a": [2], "b": 1}, sort_keys=True)
        == b'{"a":[2],"b":1}'
    )


def test_every_task_is_stored_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    for step in (0, 1):
        file = TaskFile(tmp_path)
        for index in (0, 1):
            file.log_episodes(step, "train", [Episode(task_id=f"a@{step}.0.0", index=index, task={"q": "fig"})])
        file.log_episodes(step, "eval", [Episode(task_id="a", task={"q": "lime"})])
        file.close()
    assert read_tasks(tmp_path) == {("train", "a"): {"q": "fig"}, ("eval", "a"): {"q": "lime"}}
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 2


def test_truncated_line_is_not_a_task(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"split":"train","task_id":"a","task":1}\n{"split":"tr')
    assert read_tasks(tmp_path) == {("train", "a"): 1}
    file = TaskFile(tmp_path)  # a resumed run does not append to it
    file.log_episodes(0, "train", [Episode(task_id="b", task=2)])
    file.close()
    assert read_tasks(tmp_path) == {("train", "a"): 1, ("train", "b"): 2}


def test_task_is_found_by_its_split_and_id(tmp_path: Path) -> None:
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
def test_position_of_a_task_is_not_part_of_its_id(task_id: str, plain: str) -> None:
    assert plain_task_id(task_id) == plain
