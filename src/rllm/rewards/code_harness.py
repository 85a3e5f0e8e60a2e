"""The program that runs a solution inside the sandbox, and reports what it did behind a secret that it does not know.

Its job is JSON on standard input: the `secret`, the `solution`, and either `fn_name` and `calls`, whose results are only
reported, because what was expected must stay outside; or `tests`, `functions` and `candidate`. One line is written for
each call or function. It imports nothing of ours.

A solution cannot pass by leaving early, by printing, by redefining tests or by returning what equals everything. One that
searches the interpreter's frames for the harness, or replaces a function that the tests call, such as `math.isclose`, could
pass tests that are Python; where that matters, use calls.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import os
import re
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SOLUTION_FILE = "solution.py"
PREAMBLE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from collections import *
from functools import *
from itertools import *
from math import gcd, inf, sqrt
from typing import *
"""
"""What the sites take for granted whose tasks ask for a function."""


def main() -> None:
    """Do the job."""
    job = json.load(sys.stdin)
    report = _reporter(job["secret"])
    solution = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = solution
    vars(solution)["__builtins__"] = _builtins()  # where they are not taken for the solution's own names
    loaded = _attempt(_execute, job["solution"], SOLUTION_FILE, vars(solution))
    if "error" in loaded:
        report(loaded)
    elif "calls" in job:
        _report_calls(solution, job["fn_name"], job["calls"], report)
    else:
        _report_tests(solution, job, report)


def _builtins() -> dict[str, Any]:
    names = dict(vars(builtins))
    exec(PREAMBLE, {"__builtins__": builtins}, names)
    return names


def _reporter(secret: str) -> Callable[[dict[str, Any]], None]:
    """Writes where standard output went, which leads nowhere from now on."""
    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def report(outcome: dict[str, Any]) -> None:
        line = f"{secret}{json.dumps(outcome, default=_as_json)}\n".encode()
        while line:
            line = line[os.write(channel, line) :]

    return report


def _as_json(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, and what else can be gone through as a list."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _execute(code: str | ast.Module, file_name: str, namespace: dict[str, Any]) -> None:
    exec(compile(code, file_name, "exec"), namespace)


def _attempt(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except BaseException as error:  # sys.exit(0) passes no test
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _report_calls(
    solution: types.ModuleType, fn_name: str, calls: list[list[Any]], report: Callable[..., None]
) -> None:
    for arguments in calls:
        outcome = _attempt(_call, solution, fn_name, arguments)
        written = _attempt(report, outcome)
        if "error" in written:
            report({"error": f"the result cannot be written as JSON: {written['error']}"})


def _call(solution: types.ModuleType, fn_name: str, arguments: list[Any]) -> Any:
    owner = solution if hasattr(solution, fn_name) else solution.Solution()
    return getattr(owner, fn_name)(*arguments)


def _report_tests(solution: types.ModuleType, job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    compared = ast.fix_missing_locations(_Comparisons().visit(ast.parse(job["tests"])))
    known = set(re.findall(r"\w+", job["tests"]))
    namespace = dict(vars(solution), __name__="tests", **{_HONEST: functools.partial(_honest, known)})
    loaded = _attempt(_execute, compared, "tests.py", namespace)
    if "error" in loaded or not job["functions"]:
        report({"error": loaded["error"]} if "error" in loaded else {"result": None})
        return
    for name in job["functions"]:
        arguments = [eval(job["candidate"], {**vars(solution), "__builtins__": {}})] if name == "check" else []
        outcome = _attempt(namespace[name], *arguments)
        report({"error": outcome["error"]} if "error" in outcome else {"result": None})


_HONEST = "__honest__"


class _Comparisons(ast.NodeTransformer):
    """Lets no value that the tests compare decide for itself what it is equal to."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        honest = ast.Name(_HONEST, ast.Load())
        node.left = ast.Call(honest, [node.left], [])
        node.comparators = [
            ast.Call(honest, [operand, ast.Constant(isinstance(operator, ast.In | ast.NotIn))], [])
            for operator, operand in zip(node.ops, node.comparators, strict=True)
        ]
        return node


def _honest(known: set[str], value: Any, is_searched: bool = False) -> Any:
    """The value.

    Args:
        known: words of the tests.
        value: what they compare.
        is_searched: whether they ask what is in it. What is found by its hash is not looked through then: tests may ask a large
            set for each of its items.

    Raises:
        TypeError: if it or one in it has an equality of the solution's, or equals all, and is of a class that the tests do not
            name.
    """
    kind = type(value)
    if kind in (bool, int, float, complex, str, bytes, type(None)):
        return value
    hashed = isinstance(value, set | frozenset | dict)
    if isinstance(value, list | tuple) or (hashed and not is_searched):
        for item in value.values() if isinstance(value, dict) else value:
            _honest(known, item)
    if kind.__name__.strip("_") in known:
        return value
    code = getattr(kind.__eq__, "__code__", None)
    is_own = code is not None and code.co_filename == SOLUTION_FILE
    with suppress(Exception):
        is_own = is_own or (value == object()) is True
    if is_own:
        raise TypeError(f"the solution made a {kind.__name__}, which has an equality of its own")
    return value


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads the solution has started
