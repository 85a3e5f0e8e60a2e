"""The tests of a programming task, in whichever of the published forms its dataset has them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rllm.errors import RewardError
from rllm.rewards.reading import field_of

NAME = "the code reward"


@dataclass(frozen=True)
class InputTests:
    """What a program is given on its standard input, and should write to its standard output."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class CallTests:
    """What a function, or the method of `Solution` of that name, is called with, and should return."""

    fn_name: str
    cases: list[tuple[list[Any], Any]]


@dataclass(frozen=True, kw_only=True)
class ProgramTests:
    """Python that raises if the solution is wrong, and the functions in it that are called after it has run."""

    code: str
    functions: tuple[str, ...]
    candidate: str | None
    """The expression that is given to `check(candidate)`."""


Tests: TypeAlias = InputTests | CallTests | ProgramTests


def read_tests(task: Any) -> Tests:
    """The tests in the task's `ground_truth`, `tests`, `test` or `input_output`, which may also be JSON.

    Forms: `{"inputs": [...], "outputs": [...]}` with or without `fn_name` (APPS, TACO); a list of
    `{"input": ..., "output": ...}` with or without a function's name (LiveCodeBench, Code Contests); Python with
    `assert`, `check(candidate)`, `test_...` functions or classes of tests, or a list of such statements (HumanEval,
    MBPP, LeetCode, KodCode, BigCodeBench).

    Raises:
        RewardError: if there are no tests, or they have none of these forms.
    """
    tests = _decoded(_without_arrays(field_of(task, "ground_truth", "tests", "test", "input_output", reward=NAME)))
    if isinstance(tests, Mapping) and "functional" in tests:
        tests = tests["functional"]
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = _pairs(tests["inputs"], tests["outputs"])
        return _cases(pairs, tests.get("fn_name") or task.get("fn_name"))
    if isinstance(tests, list) and tests and all(isinstance(item, Mapping) for item in tests):
        return _cases([_pair(item) for item in tests], _fn_name(tests[0]) or _fn_name(task))
    if isinstance(tests, list) and tests and all(isinstance(item, str) for item in tests):
        tests = "\n".join(tests)
    if isinstance(tests, str) and tests.strip():
        return _program(tests, task.get("entry_point"))
    raise RewardError(f"{NAME} needs input-output pairs or Python as tests, not {tests!r:.200}")


def _without_arrays(value: Any) -> Any:
    """Lists in place of NumPy's arrays, of which a table that pandas reads has them in each other."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    return [_without_arrays(item) for item in value] if isinstance(value, list | tuple) else value


def _decoded(tests: Any) -> Any:
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except ValueError:  # Python
        return tests


def _pairs(inputs: Any, outputs: Any) -> list[tuple[Any, Any]]:
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"{NAME} needs as many outputs as inputs, at least one; it got {len(outputs)} and {len(inputs)}"
        )
    return list(zip(inputs, outputs, strict=True))


def _pair(item: Mapping[str, Any]) -> tuple[Any, Any]:
    if not {"input", "output"} <= item.keys():
        raise RewardError(f"{NAME} needs 'input' and 'output' in every test; one has {sorted(map(str, item))}")
    return item["input"], item["output"]


def _fn_name(item: Mapping[str, Any]) -> str | None:
    metadata = _decoded(item.get("metadata"))
    inner = metadata if isinstance(metadata, Mapping) else {}
    return item.get("fn_name") or inner.get("fn_name") or inner.get("func_name")


def _cases(pairs: list[tuple[Any, Any]], fn_name: str | None) -> Tests:
    if fn_name is None:
        return InputTests([(_text(given), _text(expected)) for given, expected in pairs])
    return CallTests(fn_name=fn_name, cases=[_call(given, expected) for given, expected in pairs])


def _call(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """Arguments and result. Both may be texts of JSON; where the arguments are values, a text is the result itself."""
    are_values = isinstance(given, list | tuple)
    return _arguments(given), expected if are_values and isinstance(expected, str) else _value(expected)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call: a list of them, or a text with the JSON of one on each line."""
    if isinstance(given, str):
        return [_value(line.removesuffix("\r")) for line in given.split("\n") if line.strip()]
    if isinstance(given, list | tuple):
        return list(given)
    raise RewardError(f"{NAME} needs the arguments of a call as a list or as lines of JSON, not {given!r:.200}")


def _value(value: Any) -> Any:
    """A value in JSON's types; a text that is no JSON is that text."""
    return _decoded(value) if isinstance(value, str) else json.loads(json.dumps(value))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _program(code: str, entry_point: str | None) -> ProgramTests:
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        raise RewardError(f"{NAME} cannot read the task's tests as Python: {error}") from None
    defined = [node for node in body if isinstance(node, _FUNCTIONS)]
    functions = tuple(node.name for node in defined if node.name.startswith("test_"))
    functions += tuple(name for node in body if isinstance(node, ast.ClassDef) for name in _methods(node))
    for node in defined:
        if node.name in functions and len(node.args.args) > len(node.args.defaults):
            raise RewardError(f"{NAME} cannot call {node.name}, which takes arguments: fixtures are not supported")
    if any(node.name == "check" for node in defined) and not _calls_check(body):
        if not entry_point:
            raise RewardError(
                f"{NAME} needs the task's field 'entry_point': the name of what check(candidate) is given"
            )
        return ProgramTests(code=code, functions=("check", *functions), candidate=entry_point)
    if not functions and not any(map(_may_fail, body)):
        raise RewardError(
            f"{NAME} found no assert, check(candidate) or test_ function in the task's tests: {code!r:.200}"
        )
    return ProgramTests(code=code, functions=functions, candidate=None)


def _methods(node: ast.ClassDef) -> list[str]:
    """Return the tests in a class for unittest or pytest, as `Class.method`."""
    is_test = node.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    methods = [item.name for item in node.body if isinstance(item, _FUNCTIONS) and item.name.startswith("test")]
    return [f"{node.name}.{name}" for name in methods] if is_test else []


def _may_fail(node: ast.stmt) -> bool:
    """Return whether a statement can raise if the solution is wrong; a documentation string cannot."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Assert | ast.For | ast.Try | ast.While | ast.With)


def _calls_check(body: list[ast.stmt]) -> bool:
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "check" for call in calls)
