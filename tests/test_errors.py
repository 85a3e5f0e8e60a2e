from __future__ import annotations

import inspect
import json
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from rllm import errors
from rllm.errors import (
    AgentError,
    ConfigError,
    EnvError,
    InferenceError,
    MissingDependencyError,
    PromptTooLongError,
    RLLMError,
    RolloutError,
    RolloutTimeout,
    TokenMismatchError,
    all_of,
    boundary,
    counted,
    first_line,
    last_lines,
    needed,
    ungrouped,
)

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RLLMError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_can_be_pickled(kind: type[RLLMError]) -> None:
    error = kind("what was wrong")
    error.add_note("and where")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what was wrong"
    assert again.__notes__ == ["and where"]


def test_fields_of_errors_are_pickled() -> None:
    again = pickle.loads(pickle.dumps(InferenceError("busy", status_code=503)))
    assert (str(again), again.status_code) == ("busy", 503)


def test_end_of_an_output_is_never_empty() -> None:
    assert [last_lines(text) for text in ("", " \n", "one\ntwo\n")] == ["no output", "no output", "one\ntwo"]
    assert last_lines("x\n" * 9) == "[...] " + "\n".join("x" * 8)


def test_errors_are_subclasses_of_builtin_exceptions() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(TokenMismatchError, ValueError)
    assert issubclass(MissingDependencyError, ImportError)
    assert issubclass(RolloutTimeout, TimeoutError)
    assert issubclass(PromptTooLongError, InferenceError)
    assert not issubclass(TokenMismatchError, RolloutError), "it must stop the run"
    assert (InferenceError("x").status_code, PromptTooLongError("x").status_code) == (502, 400)


def test_missing_dependency_error_names_the_extra() -> None:
    text = str(MissingDependencyError.of("verl", "verl", "backend=verl"))
    assert text == "backend=verl needs the package 'verl', which is not installed: pip install 'rllm[verl]'"


def test_boundary_names_the_exception_of_the_user() -> None:
    with (
        pytest.raises(EnvError, match=r"env\.step raised ValueError: bad move") as caught,
        boundary(EnvError, "env.step"),
    ):
        raise ValueError("bad move")
    assert isinstance(caught.value.__cause__, ValueError)


def _in_a_library() -> None:
    json.loads("{")


def _with_nothing() -> None:
    raise AssertionError


def _with_two_lines() -> None:
    raise ValueError("bad move\nsecond line")


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (_in_a_library, r"JSONDecodeError: Expecting .* \(at .*test_errors.py:{line}\)$"),
        (_with_nothing, r"raised AssertionError \(at .*test_errors.py:{line}\)$"),
        (_with_two_lines, r"ValueError: bad move \(at .*test_errors.py:{line}\)\nsecond line$"),
    ],
)
def test_boundary_names_the_line_of_user_code(raises: Callable[[], None], message: str) -> None:
    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(AgentError, match=message.format(line=line)), boundary(AgentError, "agent"):
        raises()


@pytest.mark.parametrize(
    ("file", "place"),
    [("/opt/site-packages/their_agent.py", " (at /opt/site-packages/their_agent.py:2)"), ("<string>", "")],
)
def test_boundary_names_installed_agents(file: str, place: str) -> None:
    names: dict[str, Any] = {"boundary": boundary, "AgentError": AgentError}
    exec(compile("def agent():\n    raise KeyError('city')\n", file, "exec"), names)
    with pytest.raises(AgentError) as caught:
        exec("with boundary(AgentError, 'agent'):\n    agent()\n", names)
    assert str(caught.value) == f"agent raised KeyError: 'city'{place}"


@pytest.mark.parametrize("error", [TokenMismatchError("x"), InferenceError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_boundary_does_not_wrap_our_errors_and_exits(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, boundary(AgentError, "agent"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([ValueError("bad"), KeyError("k")], "agent raised ValueError: bad"),
        ([ExceptionGroup("inner", [InferenceError("busy")]), ValueError("bad")], "busy"),
        ([InferenceError("busy"), TokenMismatchError("ids differ")], "ids differ"),
    ],
)
def test_boundary_raises_one_error_of_a_group(errors: list[Exception], expected: str) -> None:
    with pytest.raises(RLLMError) as caught, boundary(AgentError, "agent"):
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)
    assert str(caught.value) == expected
    assert "TaskGroup" not in "".join(traceback.format_exception(caught.value))


def test_cause_of_an_error_in_a_group_is_kept() -> None:
    cause, error = OSError("unplugged"), InferenceError("busy")
    error.__cause__ = cause
    with pytest.raises(InferenceError) as caught, ungrouped():
        raise ExceptionGroup("two", [error, ValueError("bad")])
    assert caught.value.__cause__ is cause


def test_boundary_does_nothing_without_an_error() -> None:
    with boundary(AgentError, "agent"):
        value = 1
    assert value == 1


def test_error_that_cannot_be_formatted_shows_its_arguments() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("nothing to say")

    with pytest.raises(EnvError, match=r"env\.step raised Mute: \(7,\)"), boundary(EnvError, "env.step"):
        raise Mute(7)
    assert first_line(Mute("a")) == "('a',)"


def test_first_line_of_an_error_is_never_empty() -> None:
    assert first_line(ValueError("\n no such file\nTraceback ...")) == "no such file"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_counted_nouns_agree_with_their_number() -> None:
    assert [counted(number, "task") for number in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]
    assert [counted(number, "trajectory", "trajectories") for number in (1, 2)] == ["1 trajectory", "2 trajectories"]
    assert [all_of(number, "rollout") for number in (1, 2)] == ["the only rollout", "all 2 rollouts"]


def test_docstring_shows_the_class_hierarchy() -> None:
    assert errors.__doc__ is not None
    for kind in ALL:
        assert kind.__name__ in errors.__doc__


def test_package_that_cannot_be_imported_is_not_called_missing() -> None:
    expected = pytest.raises(MissingDependencyError, match=r"cannot be imported .*no_such_name")
    with expected, needed("json", "train", "this test"):
        from json import no_such_name  # noqa: F401
