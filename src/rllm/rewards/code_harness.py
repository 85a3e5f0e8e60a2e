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
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypedDict

from rllm.rewards.code_peer import ENDED, Ended, Peer, words_of

PREAMBLE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from collections import *
from functools import *
from itertools import *
from math import gcd, inf, sqrt
from typing import *
"""
"""Imports that are taken for granted by the sites whose tasks ask for a function."""
MODULES = {"np": "numpy", "pd": "pandas"}
"""Modules, by their customary names, that tests use without an import if the solution imports them."""

Names: TypeAlias = dict[str, Any]
Outcome: TypeAlias = dict[str, object]
"""Outcome of a call or a test: a `result` or an `error`."""
Report: TypeAlias = Callable[[Outcome], None]


class Job(TypedDict, total=False):
    """The job of this program."""

    solution: str
    fn_name: str
    calls: list[list[object]]
    tests: str
    functions: list[str]
    candidate: str | None


def main() -> None:
    """Do the job."""
    job: Job = json.load(sys.stdin)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # the job cannot be read again
    channel = os.dup(1)
    os.dup2(nowhere, 1)

    def as_json(value: Any) -> object:  # NumPy's numbers and arrays, and other iterables
        return value.tolist() if hasattr(value, "tolist") else list(value)

    def report(outcome: Outcome) -> None:
        line = f"{json.dumps(outcome, default=as_json)}\n".encode()
        while line:
            line = line[os.write(channel, line) :]

    if "calls" in job:
        report_calls(job, report)
    elif "tests" in job:
        report_tests(job, report)
    else:
        os.close(channel)
        serve_solution(job)


def _builtins() -> Names:
    names = dict(vars(builtins))
    exec(PREAMBLE, {"__builtins__": builtins}, names)
    return names


def _attempt(function: Callable[..., object], *arguments: object) -> Outcome:
    try:
        return {"result": function(*arguments)}
    except BaseException as error:  # sys.exit(0) passes no test
        return {"error": words_of(error)}


# The solution


def _load(solution: str) -> tuple[types.ModuleType, Outcome]:
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    vars(module)["__builtins__"] = _builtins()  # here, so that they do not count as the names of the solution
    return module, _attempt(lambda: exec(compile(solution, "solution.py", "exec"), vars(module)))


def report_calls(job: Job, report: Report) -> None:
    """Execute the solution, and report the result of each call."""
    solution, loaded = _load(job["solution"])
    if "error" in loaded:
        report(loaded)
        return

    def call(arguments: list[object]) -> object:
        owner = solution if hasattr(solution, job["fn_name"]) else solution.Solution()
        return getattr(owner, job["fn_name"])(*arguments)

    for arguments in job["calls"]:
        written = _attempt(report, _attempt(call, arguments))
        if "error" in written:
            report({"error": f"the result cannot be written as JSON: {written['error']}"})


def serve_solution(job: Job) -> None:
    """Execute the solution, and then answer the requests of the tests until they have ended."""
    peer = Peer(int(os.environ.pop("_RLLM_CHANNEL")), trusts=True)
    solution, loaded = _load(job["solution"])
    peer.exported[0] = solution
    names = {str(name): isinstance(value, types.ModuleType) for name, value in list(vars(solution).items())}
    with suppress(Ended):
        peer.send({**loaded, "result": None, "names": names})
        while "error" not in loaded:
            peer.serve(peer.receive())


# The tests


def report_tests(job: Job, report: Report) -> None:
    """Compile the tests, wait for the solution, execute the tests, and report the outcome of each function."""
    functions = job["functions"]
    tree = ast.parse(job["tests"])
    if functions:  # which are called one by one
        tree.body = [node for node in tree.body if not _runs_all(node)]
    code = compile(tree, "tests.py", "exec")
    own = _builtins()
    peer = Peer(int(os.environ.pop("_RLLM_CHANNEL")), trusts=False)
    try:
        hello = peer.receive()
    except Ended as ended:
        hello = {"error": str(ended)}
    theirs = hello.get("names")
    if not isinstance(theirs, dict) or "error" in hello:
        report({"error": str(hello.get("error"))[:500]})
        return
    names = {name for name, is_module in theirs.items() if not is_module}
    sys.modules["solution"] = sys.modules["__main__"] = _SolutionModule(peer, names - own.keys() - _bound_in(tree))
    namespace = {"__builtins__": own, "__name__": "tests"}

    def load() -> None:
        namespace.update(_names_for(tree, own, theirs, peer, has_candidate=bool(job["candidate"])))
        exec(code, namespace)

    def report_test(outcome: Outcome) -> None:
        if peer.is_closed:  # the tests may not have noticed
            outcome = {"error": ENDED}
        report({"error": outcome["error"]} if "error" in outcome else {"result": None})

    loaded = _attempt(load)
    if "error" in loaded or not functions:
        report_test(loaded)
        return
    for name in functions:
        candidate = job["candidate"] if name == "check" else None
        report_test(_attempt(_run_test, namespace, name, peer, candidate))


def _runs_all(node: ast.stmt) -> bool:
    """Return whether this is `unittest.main()`, which would look for tests in another module and pass with none."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("unittest.main", "pytest.main")


def _run_test(namespace: Names, name: str, peer: Peer, candidate: str | None) -> None:
    """Call a test; if it is a method, with the setup and teardown of its class."""
    owner, _, method = name.partition(".")
    if not method:
        arguments = [] if candidate is None else [peer.request("eval", 0, candidate)]
        returned = namespace[name](*arguments)
        if isinstance(returned, types.CoroutineType):
            importlib.import_module("asyncio").run(returned)
        return
    kind = namespace[owner]
    if hasattr(kind, "debug"):  # unittest's, which raises failures
        importlib.import_module("unittest").TestSuite([kind(method)]).debug()
        return
    instance = kind()
    for called in "setup_method", method, "teardown_method":
        if hasattr(instance, called):
            getattr(instance, called)()


def _names_for(tree: ast.Module, own: Names, theirs: dict[str, bool], peer: Peer, *, has_candidate: bool) -> Names:
    """Return the names that tests use but neither define nor import: from the solution, unless Python has them.

    If Python has all names that they use, as in `assert sum(10, 15) == 6`, they test functions with the name of one of
    Python's: the innermost functions that they call.
    """
    bound = _bound_in(tree)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    wanted = loaded - bound - own.keys()
    imports = any(isinstance(node, ast.ImportFrom) and node.module == "solution" for node in ast.walk(tree))
    if not wanted and not imports and not has_candidate:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        outer = {id(call) for call in calls for node in ast.walk(call) if node is not call and node in calls}
        wanted = {ast.unparse(call.func) for call in calls if id(call) not in outer} - bound
    names: Names = {}
    for name in sorted(wanted & theirs.keys()):
        if theirs[name] is not True:
            names[name] = peer.request("get", 0, name)
        elif name in MODULES or name in sys.stdlib_module_names:
            names[name] = importlib.import_module(MODULES.get(name, name))
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


class _SolutionModule(types.ModuleType):
    """Module that tests get from `import solution`."""

    def __init__(self, peer: Peer, names: set[str]) -> None:
        super().__init__("solution")
        self.__all__ = [name for name in sorted(names) if not name.startswith("_")]
        self._peer = peer

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.request("get", 0, name)
