from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.data import Dataset, DatasetRegistry
from rllm.data.prepare import converted, distinct_tasks, register_random, run
from rllm.errors import ConfigError, MissingDependencyError


def digit(rng: random.Random) -> dict[str, int]:
    return {"n": rng.randrange(10)}


def test_tasks_are_distinct_and_a_function_of_the_seed() -> None:
    tasks = distinct_tasks(digit, 10, seed=1)
    assert sorted(task["n"] for task in tasks) == list(range(10))
    assert distinct_tasks(digit, 4, seed=1) == tasks[:4] != distinct_tasks(digit, 4, seed=2)


def test_more_tasks_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"11 tasks .* 10 "):
        distinct_tasks(digit, 11, seed=0)


def test_splits_share_no_task_and_the_test_split_stays(home: Path) -> None:
    train, test = register_random("digits", digit, train=7, test=3, seed=5)
    assert (train.split, test.split, len(train), len(test)) == ("train", "test", 7, 3)
    assert sorted(row["n"] for row in [*train, *test]) == list(range(10))
    assert list(register_random("digits", digit, train=1, test=3, seed=5)[1]) == list(test)
    assert DatasetRegistry.get_metadata("digits", "test") == {"seed": 5}
    with pytest.raises(ConfigError, match="test=0: use at least 1 task"):
        register_random("digits", digit, train=1, test=0, seed=5)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("size=1: use 2"), 2), (MissingDependencyError("no datasets"), 1)]
)
def test_a_program_ends_with_the_sentence_and_the_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*, size: int = 1) -> list[Dataset]:
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(prepare, [])
    assert stopped.value.code == code
    assert capsys.readouterr().err == f"{error}\n"


def test_each_parameter_is_an_option() -> None:
    seen: list[Any] = []

    def prepare(*, num_rows: int = 1, p: float = 0.5, is_hard: bool = False) -> list[Dataset]:
        seen.extend([num_rows, p, is_hard])
        return []

    run(prepare, ["--num-rows", "3", "--is-hard"])
    assert seen == [3, 0.5, True]


def test_a_row_that_does_not_convert_is_named() -> None:
    with pytest.raises(ConfigError, match="row 2 of x has no field 'answer': it has question; has the dataset changed"):
        converted(lambda row: {"a": row["answer"]}, {"question": "?"}, "row 2 of x")
    with pytest.raises(ConfigError, match="row 2 of x: could not convert string to float: 'b'"):
        converted(lambda row: {"a": float(row["answer"])}, {"answer": "b"}, "row 2 of x")


def test_a_program_from_the_shell(home: Path) -> None:
    command = [sys.executable, "-m", "rllm.data.prepare_countdown", "--train", "4", "--test", "2", "--seed", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    train, test = (f"{split}.jsonl" for split in ("train", "test"))
    assert done.stderr.splitlines() == [
        f"countdown, split train: 4 rows in {home}/datasets/countdown/{train}",
        f"countdown, split test: 2 rows in {home}/datasets/countdown/{test}",
    ]
    assert DatasetRegistry.get_dataset_splits("countdown") == ["test", "train"]
