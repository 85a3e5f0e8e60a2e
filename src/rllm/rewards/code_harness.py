"""Program of a sandbox that judges a solution: it executes the solution, or the tests, but never both.

Its job is JSON on standard input, in one of three forms:

- `solution`, `fn_name` and `calls`: call the function, and report each result. Expected results stay outside.
- `solution`: execute the solution, and serve the process with the tests (`Peer`).
- `tests`, `functions` and `candidate`: execute the tests. The solution's functions and objects are `Remote`:
  plain values come back as copies of exact types, and everything else stays with the solution. Operators decide here:
  an object of the solution is never compared or combined with a value of the tests by a method of its own.

One line is reported for each call or test function. Besides `code_peer` it imports nothing of ours.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from rllm.rewards.code_peer import ENDED, Ended, Peer, words_of

PREAMBLE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from collections import *
from functools import *
from itertools import *
from math import gcd, inf, sqrt
from typing import *
"""
"""Imports that the sites whose tasks ask for a function take for granted."""
MODULES = {"np": "numpy", "pd": "pandas"}
"""Modules that tests use without an import where the solution imports them, by the names that everybody gives them."""


def main() -> None:
    """Do the job."""
    job = json.load(sys.stdin)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # the job cannot be read again
    channel = os.dup(1)
    os.dup2(nowhere, 1)
    if "calls" in job:
        report_calls(job, functools.partial(_report, channel))
    elif "tests" in job:
        report_tests(job, functools.partial(_report, channel))
    else:
        os.close(channel)
        serve_solution(job)


def _report(channel: int, outcome: dict[str, Any]) -> None:
    line = f"{json.dumps(outcome, default=_as_json)}\n".encode()
    while line:
        line = line[os.write(channel, line) :]


def _as_json(value: Any) -> Any:
    """Return NumPy's numbers and arrays as Python's, and other iterables as lists."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _builtins() -> dict[str, Any]:
    names = dict(vars(builtins))
    exec(PREAMBLE, {"__builtins__": builtins}, names)
    return names


def _attempt(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except BaseException as error:  # sys.exit(0) passes no test
        return {"error": words_of(error)}


# The solution


def _load(solution: str) -> tuple[types.ModuleType, dict[str, Any]]:
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    vars(module)["__builtins__"] = _builtins()  # where they are not taken for the solution's own names
    return module, _attempt(lambda: exec(compile(solution, "solution.py", "exec"), vars(module)))


def report_calls(job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Execute the solution, and report what each call returns."""
    solution, loaded = _load(job["solution"])
    if "error" in loaded:
        report(loaded)
        return
    for arguments in job["calls"]:
        outcome = _attempt(_call, solution, job["fn_name"], arguments)
        written = _attempt(report, outcome)
        if "error" in written:
            report({"error": f"the result cannot be written as JSON: {written['error']}"})


def _call(solution: types.ModuleType, fn_name: str, arguments: list[Any]) -> Any:
    owner = solution if hasattr(solution, fn_name) else solution.Solution()
    return getattr(owner, fn_name)(*arguments)


def serve_solution(job: dict[str, Any]) -> None:
    """Execute the solution, and then what the tests ask of it, until they have ended."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)
    sys.stdout = printed
    peer = Peer(int(os.environ.pop("_RLLM_CHANNEL")), trusts=True, printed=printed)
    solution, loaded = _load(job["solution"])
    peer.exported[0] = solution
    names = {str(name): isinstance(value, types.ModuleType) for name, value in list(vars(solution).items())}
    with suppress(Ended):
        peer.send({**loaded, "result": None, "names": names})
        while "error" not in loaded:
            peer.serve(peer.receive())


# The tests


def report_tests(job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Compile the tests, wait for the solution, execute the tests, and report what became of each function."""
    tree = ast.parse(job["tests"])
    if job["functions"]:  # which are called one by one
        tree.body = [node for node in tree.body if not _runs_all(node)]
    code = compile(tree, "tests.py", "exec")
    own = _builtins()
    peer = Peer(int(os.environ.pop("_RLLM_CHANNEL")), trusts=False)
    try:
        hello = peer.receive()
    except Ended as ended:
        hello = {"error": str(ended)}
    if not isinstance(hello.get("names"), dict) or "error" in hello:
        report({"error": str(hello.get("error"))[:500]})
        return
    sys.modules["solution"] = sys.modules["__main__"] = _SolutionModule(
        peer, {name for name, is_module in hello["names"].items() if not is_module} - own.keys() - _bound_in(tree)
    )
    names = functools.partial(_names_for, tree, own, hello["names"], peer, has_candidate=bool(job["candidate"]))
    for outcome in _outcomes(job, code, {"__builtins__": own, "__name__": "tests"}, names, peer):
        report({"error": outcome["error"]} if "error" in outcome else {"result": None})


def _outcomes(
    job: dict[str, Any],
    code: types.CodeType,
    namespace: dict[str, Any],
    names: Callable[[], dict[str, Any]],
    peer: Peer,
) -> Iterator[dict[str, Any]]:
    def load() -> None:
        namespace.update(names())
        exec(code, namespace)

    loaded = _attempt(load)
    if "error" in loaded or not job["functions"]:
        yield _while_there(peer, loaded)
        return
    for name in job["functions"]:
        test = functools.partial(_call_method, namespace, name) if "." in name else namespace[name]
        if name == "check":
            yield _while_there(peer, _attempt(lambda test=test: test(peer.request("eval", None, job["candidate"]))))
        else:
            yield _while_there(peer, _attempt(_run, test))


def _runs_all(node: ast.stmt) -> bool:
    """Return whether this is `unittest.main()`, which would look for tests in another module and pass with none."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("unittest.main", "pytest.main")


def _run(test: Callable[[], Any]) -> None:
    returned = test()
    if isinstance(returned, types.CoroutineType):
        importlib.import_module("asyncio").run(returned)


def _call_method(namespace: dict[str, Any], name: str) -> None:
    """Call a test that is a method, with what its class does before and after it."""
    owner, _, method = name.partition(".")
    kind = namespace[owner]
    if hasattr(kind, "debug"):  # unittest, where it raises what is wrong
        importlib.import_module("unittest").TestSuite([kind(method)]).debug()
        return
    instance = kind()
    for called in "setup_method", method, "teardown_method":
        if hasattr(instance, called):
            getattr(instance, called)()


def _while_there(peer: Peer, outcome: dict[str, Any]) -> dict[str, Any]:
    """Fail a test that ended without the solution, which tests may not notice."""
    return {"error": ENDED} if peer.is_closed else outcome


def _names_for(
    tree: ast.Module, own: dict[str, Any], theirs: dict[str, bool], peer: Peer, *, has_candidate: bool
) -> dict[str, Any]:
    """Return what the tests use and neither define nor import: from the solution, unless Python has it.

    Where Python has everything that they use, as in `assert sum(10, 15) == 6`, they test functions that bear the name
    of one of Python's: those that they call innermost.
    """
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    wanted = loaded - _bound_in(tree) - own.keys()
    imports = any(isinstance(node, ast.ImportFrom) and node.module == "solution" for node in ast.walk(tree))
    if not wanted and not imports and not has_candidate:
        wanted = _innermost_calls(tree) - _bound_in(tree)
    names: dict[str, Any] = {}
    for name in sorted(wanted & theirs.keys()):
        if theirs[name] is True:
            if name in MODULES or name in sys.stdlib_module_names:
                names[name] = importlib.import_module(MODULES.get(name, name))
        else:
            names[name] = peer.request("get", None, name)
    return names


def _bound_in(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _innermost_calls(tree: ast.Module) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    outer = {id(call) for call in calls for node in ast.walk(call) if node is not call and node in calls}
    return {call.func.id for call in calls if id(call) not in outer}  # type: ignore[attr-defined]


class _SolutionModule(types.ModuleType):
    """Module that tests get from `import solution`."""

    def __init__(self, peer: Peer, names: set[str]) -> None:
        super().__init__("solution")
        self.__all__ = [name for name in sorted(names) if not name.startswith("_")]
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.request("get", None, name)
