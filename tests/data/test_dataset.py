from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.data import Dataset
from rllm.errors import ConfigError

LETTERS = Dataset([{"letter": letter} for letter in "abcdefgh"], name="letters", split="train")


def letters_of(data: Dataset) -> str:
    return "".join(row["letter"] for row in data)


def test_dataset_is_a_sequence_of_dicts() -> None:
    data = Dataset([{"n": 1}, {"n": 2}], name="mine", split="train")
    assert (len(data), data[0], data[-1:], data.name, data.split) == (2, {"n": 1}, [{"n": 2}], "mine", "train")
    assert data.get_data() == list(data) == [{"n": 1}, {"n": 2}]
    assert repr(data) == "Dataset(name='mine', split='train', 2 rows)"
    assert data
    assert not Dataset([])


def test_dataset_can_be_pickled() -> None:
    repeated = LETTERS.select([2]).repeat(2)
    copy = pickle.loads(pickle.dumps(repeated))
    assert (list(copy), copy.task_id(1)) == ([{"letter": "c"}] * 2, "2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"a": 1}, "b"], "row 1 of the dataset is 'b': use an object"),
        ("tasks.jsonl", r"Dataset\('tasks.jsonl'\): pass rows; Dataset.load reads files"),
        (Path("tasks.jsonl"), "pass rows"),
        (lambda: [{"a": 1}], "pass rows"),
        ({"a": 1}, "pass a list of rows"),
        (7, "pass a list of rows"),
    ],
)
def test_non_rows_are_rejected(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset(data)


def test_generator_cannot_be_used_twice() -> None:
    def tasks() -> Iterator[dict[str, Any]]:
        yield {"n": 1}

    rows = tasks()
    assert list(Dataset(rows)) == [{"n": 1}]
    with pytest.raises(ConfigError, match="generator 'tasks'"):
        Dataset(rows)


def test_columns_are_the_fields_of_all_rows() -> None:
    assert Dataset([{"a": 1}, {"b": 3}, {"a": 4}]).shapes() == {frozenset("a"): 0, frozenset("b"): 1}
    assert Dataset([]).shapes() == {}


@pytest.mark.parametrize(
    ("row", "task_id"),
    [
        ({"task_id": "x:1", "id": 5}, "x:1"),
        ({"id": 0}, "0"),
        ({"id": None}, "1"),
        ({"question": "q"}, "1"),
        ({"id": "\ud800"}, "?"),
    ],
)
def test_task_id_is_the_id_or_the_number_of_the_row(row: dict[str, Any], task_id: str) -> None:
    assert Dataset([{}, row]).task_id(1) == task_id


def test_repeat_keeps_copies_adjacent_under_one_task_id() -> None:
    data = LETTERS.select([1, 0]).repeat(3)
    assert letters_of(data) == "bbbaaa"
    assert [data.task_id(index) for index in range(6)] == ["1", "1", "1", "0", "0", "0"]
    data[0]["letter"] = "z"
    assert letters_of(data) == "zbbaaa"
    assert (LETTERS[1], data.name, data.split) == ({"letter": "b"}, "letters", "train")


def test_shuffle_depends_only_on_the_seed_and_keeps_task_ids() -> None:
    data = LETTERS.shuffle(1)
    assert letters_of(data) == letters_of(LETTERS.shuffle(1)) != letters_of(LETTERS.shuffle(2))
    assert sorted(letters_of(data)) == list("abcdefgh") != list(letters_of(data))
    assert all("abcdefgh"[int(data.task_id(place))] == row["letter"] for place, row in enumerate(data))
    assert sorted(letters_of(LETTERS.shuffle(None))) == list("abcdefgh")


def test_select_keeps_the_given_order() -> None:
    assert letters_of(LETTERS.select([3, -1, 3])) == "dhd"
    with pytest.raises(ConfigError, match="there is no row 8; the dataset has 8"):
        LETTERS.select([0, 8])


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ((0.75,), [6, 2]),
        ((0.5, 0.25, 0.25), [4, 2, 2]),
        ((1.0,), [8]),
        ((5,), [5, 3]),
        ((5, 2, 1), [5, 2, 1]),
        ((0.1 + 0.2, 0.7), [2, 6]),
    ],
)
def test_split_into_puts_each_row_into_one_part(sizes: tuple[float, ...], lengths: list[int]) -> None:
    parts = LETTERS.split_into(*sizes, seed=3)
    assert [len(part) for part in parts] == lengths
    assert sorted("".join(map(letters_of, parts))) == list("abcdefgh")
    assert letters_of(parts[0]) == letters_of(LETTERS.shuffle(3))[: lengths[0]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "use numbers of rows, or fractions"),
        ((0.5, 4), "only numbers of rows, or only fractions"),
        ((-1,), "use numbers of rows, or fractions"),
        ((5, 0), "use numbers of rows, or fractions"),
        ((9,), r"split_into\(9,\): the dataset has 8 rows; the sizes may sum to 8"),
        ((0.9, 0.2), "the sizes may sum to 1.0"),
        ((0.99,), r"gives parts of \[8, 0\] rows"),
    ],
)
def test_impossible_splits_are_rejected(sizes: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LETTERS.split_into(*sizes)


def test_repeat_requires_a_positive_number() -> None:
    with pytest.raises(ConfigError, match=r"repeat\(0\): use at least 1"):
        LETTERS.repeat(0)


def test_unregistered_dataset_has_no_paths() -> None:
    assert LETTERS.get_data_path() is None
    assert LETTERS.get_verl_data_path() is None
