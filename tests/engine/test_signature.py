from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rllm.engine.signature import arguments_for, check_signature, parameters_of
from rllm.errors import ConfigError
from rllm.sdk import trajectory

URL = "http://gw/sessions/s/v1"


def exact(question: str, answer: str) -> None: ...
def with_default(question: str, answer: str = "4") -> None: ...
def with_kwargs(question: str, **kwargs: Any) -> None: ...
def with_url(question: str, base_url: str) -> None: ...
def positional(question: str, /) -> None: ...
def whole(task: dict[str, Any]) -> None: ...


class Agent:
    def __call__(self, question: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (exact, ["question", "answer"]),
        (exact, ["question", "answer", "id"]),
        (exact, ["question", "answer", "task_id"]),
        (with_default, ["question"]),
        (with_kwargs, ["question", "anything"]),
        (with_url, ["question"]),
        (Agent(), ["question"]),
        (Agent().__call__, ["question"]),
        (partial(exact, answer="4"), ["question"]),
        (trajectory(exact), ["question", "answer"]),
        (print, ["sep", "end"]),
    ],
)
def test_matching_signatures_are_accepted(function: Any, columns: list[str]) -> None:
    check_signature(function, columns)


@pytest.mark.parametrize(
    ("function", "columns", "content"),
    [
        (exact, ["question"], r"exact needs 'answer'.*the data has \['question'\]"),
        (exact, ["question", "answer", "Level"], r"exact does not take the column 'Level'.*add \*\*kwargs"),
        (with_kwargs, [], r"with_kwargs needs 'question'.*the data has \[\]"),
        (positional, ["question"], "positional-only"),
        (Agent(), ["prompt"], "Agent needs 'question'"),
        (partial(exact, answer="4"), [], "exact needs 'question'"),
        (whole, ["question"], r"whole needs 'task'.* by name, so name them, or take the whole row as \*\*task"),
        (with_kwargs, ["question", 1], "with_kwargs cannot take the column 1: columns are passed by name"),
    ],
)
def test_mismatched_signatures_are_reported(function: Any, columns: list[str], content: str) -> None:
    with pytest.raises(ConfigError, match=content):
        check_signature(function, columns)


def test_arguments_are_the_columns() -> None:
    task = {"question": "2+2", "id": 7}
    assert arguments_for(parameters_of(with_kwargs), task, URL) == task
    assert arguments_for(parameters_of(with_default), task, URL) == {"question": "2+2"}
    assert arguments_for(parameters_of(with_url), task, URL) == {"question": "2+2", "base_url": URL}
    assert arguments_for(parameters_of(with_url), {"question": "2+2", "base_url": "mine"}, URL)["base_url"] == "mine"
    assert task == {"question": "2+2", "id": 7}
