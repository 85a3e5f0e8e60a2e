"""Known datasets. Those of the hub are a few rows in its schema, in folders that replace the hub's ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rllm.data import Dataset, DatasetRegistry, benchmark_rows, benchmarks, prepare
from rllm.data.benchmark_rows import boxed_answer
from rllm.data.benchmarks import BENCHMARKS
from rllm.data.dataset import PREPARED
from rllm.environments.grid_world import GridWorldEnv, num_moves
from rllm.errors import ConfigError, MissingDependencyError


def digit(rng: random.Random, number: int = 0) -> dict[str, int]:
    return {"n": rng.randrange(10)}


def test_tasks_are_distinct_and_follow_from_the_seed() -> None:
    tasks = benchmark_rows.distinct_tasks(digit, 10, seed=1)
    assert sorted(task["n"] for task in tasks) == list(range(10))
    assert (
        benchmark_rows.distinct_tasks(digit, 4, seed=1) == tasks[:4] != benchmark_rows.distinct_tasks(digit, 4, seed=2)
    )


def test_requesting_too_many_tasks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"11 tasks .* 10 "):
        benchmark_rows.distinct_tasks(digit, 11, seed=0)


def test_splits_share_no_task_and_the_test_split_is_fixed(home: Path) -> None:
    train, test = prepare.register_random("digits", digit, train=7, test=3, seed=5)
    assert (train.split, test.split, len(train), len(test)) == ("train", "test", 7, 3)
    assert sorted(row["n"] for row in [*train, *test]) == list(range(10))
    assert list(prepare.register_random("digits", digit, train=1, test=3, seed=5)[1]) == list(test)
    assert DatasetRegistry.get_metadata("digits", "test") == {"seed": 5}
    with pytest.raises(ConfigError, match="test=0: use at least 1 task"):
        prepare.register_random("digits", digit, train=1, test=0, seed=5)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("size=1: use 2"), 2), (MissingDependencyError("no datasets"), 1)]
)
def test_program_exits_with_message_and_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*, size: int = 1) -> list[Dataset]:
        raise error

    monkeypatch.setitem(prepare.PREPARE, "gsm8k", fail)
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["gsm8k"])
    assert stopped.value.code == code
    assert capsys.readouterr().err == f"{error}\n"


def test_each_parameter_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def make(*, num_rows: int = 1, p: float = 0.5, is_hard: bool = False) -> list[Dataset]:
        seen.extend([num_rows, p, is_hard])
        return []

    monkeypatch.setitem(prepare.PREPARE, "gsm8k", make)
    prepare.main(["gsm8k", "--num-rows", "3", "--is-hard"])
    assert seen == [3, 0.5, True]


def test_every_prepared_dataset_has_a_program() -> None:
    assert set(prepare.PREPARE) == PREPARED


def test_prepare_program_runs_from_the_shell(home: Path) -> None:
    command = [sys.executable, "-m", "rllm.data.prepare", "countdown", "--train", "4", "--test", "2", "--seed", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    train, test = (f"{split}.jsonl" for split in ("train", "test"))
    assert done.stderr.splitlines() == [
        f"countdown, split train: 4 rows in {home}/datasets/countdown/{train}",
        f"countdown, split test: 2 rows in {home}/datasets/countdown/{test}",
    ]
    assert DatasetRegistry.get_dataset_splits("countdown") == ["test", "train"]


def reachable(nums: list[Fraction]) -> Iterator[Fraction]:
    """Return every value that can be made of these numbers, each used once."""
    if len(nums) == 1:
        yield nums[0]
    for i, a in enumerate(nums):
        for j, b in enumerate(nums):
            rest = [other for k, other in enumerate(nums) if k not in (i, j)]
            if i < j:
                yield from reachable([*rest, a + b])
                yield from reachable([*rest, a * b])
            if i != j:
                yield from reachable([*rest, a - b])
                if b:
                    yield from reachable([*rest, a / b])


def test_every_countdown_task_can_be_solved(home: Path) -> None:
    train, test = prepare.prepare_countdown(train=8, test=4, seed=3)
    for task in [*train, *test]:
        assert set(task) == {"question", "target", "nums", "ground_truth"}
        assert len(task["nums"]) in (3, 4)
        assert all(1 <= num <= 99 for num in task["nums"])
        assert 10 <= task["target"] <= 100
        assert task["ground_truth"] == str(task["target"])
        assert task["target"] in reachable([Fraction(num) for num in task["nums"]])
    assert list(DatasetRegistry.load_dataset("countdown", "train") or []) == list(train)


def test_unsolvable_numbers_are_drawn_again() -> None:
    rng = random.Random(550382)  # begins with 2, 1 and 2
    assert benchmark_rows.countdown_task(rng)["nums"] == [21, 23, 41, 55]


def test_countdown_question_states_target_and_numbers() -> None:
    task = benchmark_rows.countdown_task(random.Random(0))
    assert f"equals {task['target']}," in task["question"]
    assert all(str(num) in task["question"] for num in task["nums"])


def test_product_binds_before_a_sum() -> None:
    assert benchmark_rows.value_of(2, []) == 2
    assert benchmark_rows.value_of(2, [("+", 3), ("*", 4), ("-", 5), ("*", 2)]) == 4
    assert benchmark_rows.value_of(2, [("*", 3), ("*", 4)]) == 24


def test_arithmetic_has_the_requested_difficulty(home: Path) -> None:
    train, test = prepare.prepare_arithmetic(train=30, test=10, digits=3, operators=2)
    operators = [sum(row["question"].count(f" {sign} ") for sign in "+-*") for row in [*train, *test]]
    numbers = [word for row in train for word in row["question"].rstrip("?").split() if word.isdecimal()]
    assert set(operators) == {1, 2}
    assert {len(number) for number in numbers} == {1, 2, 3}
    assert all(set(row) == {"question", "ground_truth"} for row in train)
    for row in train:
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == row["ground_truth"]


@pytest.mark.parametrize("is_slippery", [False, True])
def test_every_grid_world_is_solvable(home: Path, is_slippery: bool) -> None:
    train, test = prepare.prepare_grid_world(train=5, test=2, size=5, p=0.6, is_slippery=is_slippery)
    steps = 60 if is_slippery else 20
    assert len({task["seed"] for task in [*train, *test]}) == 7
    for task in [*train, *test]:
        assert task == {"seed": task["seed"], "size": 5, "p": 0.6, "is_slippery": is_slippery, "max_steps": steps}
        assert num_moves(GridWorldEnv.from_dict(task).grid, at_most=steps) is not None


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (prepare.prepare_grid_world, {"size": 1}, "size=1: use 2 to 64"),
        (prepare.prepare_grid_world, {"p": 1.5}, "p=1.5: use a probability"),
        (prepare.prepare_arithmetic, {"digits": 0}, "digits=0: use at least 1"),
        (prepare.prepare_arithmetic, {"operators": 0}, "operators=0: use at least 1"),
        (prepare.prepare_arithmetic, {"digits": 1, "operators": 1}, "than 300"),
        (prepare.prepare_countdown, {"train": 0}, "train=0: use at least 1 task"),
    ],
)
def test_invalid_parameters_are_rejected(home: Path, make: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**wrong)
    assert DatasetRegistry.get_dataset_names() == []


def hub_folder(folder: Path, subsets: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Write a dataset in the hub's layout: a file for each split of each subset, and a card that names them."""
    configs = []
    for subset, splits in subsets.items():
        (folder / subset).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / subset / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [{"split": split, "path": f"{subset}/{split}.jsonl"} for split in splits]
        configs.append({"config_name": subset, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return str(folder)


@pytest.mark.usefixtures("hub_cache")
def test_benchmark_of_the_hub_is_prepared(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"question": "How many?", "answer": "Add them: 600+634=<<600+634=1234>>1,234\n#### 1,234"}
    folder = hub_folder(tmp_path / "gsm8k", {"main": {"train": [row] * 3, "test": [row]}, "socratic": {"train": [row]}})
    monkeypatch.setitem(benchmarks.BENCHMARKS, "gsm8k", replace(BENCHMARKS["gsm8k"], hub_id=folder))
    test, train = prepare.prepare_benchmark("gsm8k", train=2)
    assert list(train) == [{"question": "How many?", "ground_truth": "1234", "data_source": "gsm8k"}] * 2
    assert (len(test), DatasetRegistry.get_dataset_splits("gsm8k")) == (1, ["test", "train"])
    with pytest.raises(ConfigError, match="train=-1: use the largest number of rows to take, or 0 for all"):
        prepare.prepare_benchmark("gsm8k", train=-1)


@pytest.mark.usefixtures("hub_cache")
def test_several_subsets_are_mixed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[{"problem": subject, "solution": rf"So $\boxed{{{n}}}$."} for n in range(2)] for subject in "abcdefg"]
    subsets = {subject: {"train": of, "test": of} for subject, of in zip("abcdefg", rows, strict=True)}
    chosen = replace(
        BENCHMARKS["hendrycks_math"], hub_id=hub_folder(tmp_path / "math", subsets), subsets=tuple("abcdefg")
    )
    monkeypatch.setitem(benchmarks.BENCHMARKS, "hendrycks_math", chosen)
    tasks = benchmarks.read_benchmark("hendrycks_math", "train")
    assert sorted(task["question"] for task in tasks) == sorted("abcdefg" * 2)
    assert len({task["question"] for task in tasks[:7]}) > 4
    assert len(benchmarks.read_benchmark("hendrycks_math", "train", limit=10)) == 10


@pytest.mark.usefixtures("hub_cache")
def test_row_in_another_format_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "other", {"main": {"test": [{"question": "?", "answer": "7"}]}})
    monkeypatch.setitem(benchmarks.BENCHMARKS, "gsm8k", replace(BENCHMARKS["gsm8k"], hub_id=folder))
    with pytest.raises(ConfigError, match=r"row 0 of .*other \(test\): there is no '####' in the answer '7'"):
        benchmarks.read_benchmark("gsm8k")
    chosen = replace(BENCHMARKS["math500"], hub_id=folder, subsets=("main",))
    monkeypatch.setitem(benchmarks.BENCHMARKS, "math500", chosen)
    with pytest.raises(ConfigError, match="has no field 'problem', only question, answer"):
        benchmarks.read_benchmark("math500")
    with pytest.raises(ConfigError, match="split='train': dataset 'math500' has the splits test"):
        benchmarks.read_benchmark("math500", "train")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"First $\boxed{1}$, then $\boxed{ 2 }$.", "2"),
        (r"$\boxed{\left\{ \frac{1}{2} \right\}}$", r"\left\{ \frac{1}{2} \right\}"),
        (r"It is $\boxed 5$.", "5"),
        (r"$\fbox{12}$", "12"),
    ],
)
def test_answer_is_in_the_last_box(solution: str, answer: str) -> None:
    assert boxed_answer(solution) == answer


@pytest.mark.parametrize(
    ("solution", "message"), [("It is 5.", r"there is no .boxed"), (r"\boxed{5", "no closing brace")]
)
def test_solution_without_answer_is_rejected(solution: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boxed_answer(solution)
