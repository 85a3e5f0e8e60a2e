"""The reward for programs: the last block of Python passes every test, in the sandbox."""

from __future__ import annotations

import ast
import json
import math
import re
import reprlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rllm.data.rows import plain_value
from rllm.errors import RewardError
from rllm.rewards.code_peer import ENDED
from rllm.rewards.reward_types import (
    RewardConfig,
    RewardInput,
    RewardOutput,
    after_thinking,
    field_of,
    python_blocks,
    text_of_action,
)
from rllm.rewards.reward_types import RewardType as RewardType
from rllm.sandbox.python import PythonOptions, SandboxResult, run_judged, run_python
from rllm.types import JSONMapping, JSONObject, Task

NAME = "the code reward"
MAX_REPORT_BYTES = 4 << 20

_HARNESS = f"""
import importlib.util, os, sys
for name in "code_peer", "code_harness":
    spec = importlib.util.spec_from_file_location(f"rllm.rewards.{{name}}", f"{Path(__file__).parent}/{{name}}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
module.main()
os._exit(0)  # whatever threads the solution has started
"""
"""Loads the program without the rest of the package, which the sandbox does not need."""


@dataclass(frozen=True)
class RewardCodeFn:
    """Reward for the last closed block of Python in a text, which must pass every test that `read_tests` finds.

    If the tests call a function, the block is the last one that defines it, if any: examples of its use may follow.
    The task's `preamble`, such as the imports above a function to complete, is put in front of the block.

    The verdict is never computed in a process that executes the solution, so a solution cannot win by changing its own
    process. Outputs and results of calls are compared outside the sandbox, which never receives expected values. Tests
    written in Python run in a second sandbox, where functions and objects of the solution are proxies of those in the
    first, and plain values are copies. Such tests are as strict as they are written. Two things remain under the
    control of the solution: helper functions that the tests use but neither define nor import, and comparisons between
    two of its own objects. Comparing or combining its own object with a plain value is an error.

    Any behaviour of the solution earns a reward; a sandbox that could not be set up raises, which leaves the answer
    unscored. The metadata has `passed`, `total` and `first_failure`. For programs that read standard input, testing
    stops at the first failure.
    """

    config: RewardConfig = field(default_factory=RewardConfig)
    timeout_s: float = 10.0
    """Seconds for each run: of one input, or of all calls."""
    deadline_s: float = 60.0
    """Seconds for all runs together."""
    memory_mb: int = 512

    def __call__(self, task_info: Task | RewardInput, action: object = None) -> RewardOutput:
        """Judge `action` for a task.

        Raises:
            RewardError: if the task has no usable tests.
            SandboxError: if a sandbox could not be set up.
        """
        given = RewardInput.of(task_info, action)
        tests = read_tests(given.task_info)
        blocks = python_blocks(after_thinking(text_of_action(given.action, NAME)))
        if not blocks:
            reason = "there is no closed block of Python (```python ... ```)"
            return RewardOutput(self.config.format_error_reward, {"reason": reason}, False)
        if preamble := given.task_info.get("preamble"):
            blocks = [f"{preamble}\n{block}" for block in blocks]
        match tests:
            case InputTests():
                metadata = self._run_inputs(blocks[-1], tests)
            case CallTests():
                metadata = self._run_calls(_last_that_defines(tests.fn_name, blocks), tests)
            case ProgramTests():
                metadata = self._run_program(_last_that_defines(tests.candidate, blocks), tests)
        is_correct = "first_failure" not in metadata
        reward = self.config.correct_reward if is_correct else self.config.incorrect_reward
        return RewardOutput(reward, metadata, is_correct)

    def _run_inputs(self, solution: str, tests: InputTests) -> JSONObject:
        end, total = time.monotonic() + self.deadline_s, len(tests.cases)
        for index, (stdin, expected) in enumerate(tests.cases):
            seconds = min(self.timeout_s, end - time.monotonic())
            if seconds <= 0:
                return _verdict(index, total, {"test": index, "error": f"not finished in {self.deadline_s:g} s"})
            max_bytes = 64_000 + 4 * len(expected)  # no character takes more
            run = run_python(
                solution, stdin=stdin, timeout_s=seconds, memory_mb=self.memory_mb, max_output_bytes=max_bytes
            )
            if not run.ok or not _same_output(run.stdout, expected):
                outcome = {"got": run.stdout} if run.ok else {"error": _end_of(run, seconds)}
                return _verdict(index, total, {"test": index, "input": stdin, "expected": expected, **outcome})
        return _verdict(total, total)

    def _run_calls(self, solution: str, tests: CallTests) -> JSONObject:
        job = {"solution": solution, "fn_name": tests.fn_name, "calls": [arguments for arguments, _ in tests.cases]}
        limits = self._limits(job)
        run = run_python(_HARNESS, **limits)
        outcomes = _outcomes(run, len(tests.cases), limits["timeout_s"])
        failures: list[JSONObject] = []
        for index, (outcome, (arguments, expected)) in enumerate(zip(outcomes, tests.cases, strict=True)):
            if "error" in outcome or not _same_result(outcome["result"], expected):
                got = {"error": outcome["error"]} if "error" in outcome else {"got": outcome["result"]}
                failures.append({"test": index, "input": arguments, "expected": expected, **got})
        return _verdict(len(outcomes) - len(failures), len(outcomes), *failures[:1])

    def _run_program(self, solution: str, tests: ProgramTests) -> JSONObject:
        names = tests.functions or ("the assertions",)
        limits = self._limits({"tests": tests.code, "functions": tests.functions, "candidate": tests.candidate})
        run, solution_run = run_judged(_HARNESS, _HARNESS, judged_stdin=json.dumps({"solution": solution}), **limits)
        outcomes = _outcomes(run, len(names), limits["timeout_s"])
        ended = f"not run: {_end_of(solution_run, limits['timeout_s'])}"
        failures: list[JSONObject] = [
            {"test": name, "error": ended if outcome["error"] == ENDED else outcome["error"]}
            for name, outcome in zip(names, outcomes, strict=True)
            if "error" in outcome
        ]
        return _verdict(len(names) - len(failures), len(names), *failures[:1])

    def _limits(self, job: JSONObject) -> PythonOptions:
        return {
            "stdin": json.dumps(job),
            "timeout_s": min(self.timeout_s, self.deadline_s),
            "memory_mb": self.memory_mb,
            "max_output_bytes": MAX_REPORT_BYTES,
        }


def _last_that_defines(function: str | None, blocks: list[str]) -> str:
    if function is None:
        return blocks[-1]
    defines = re.compile(rf"^[^\S\n]*+(?:async\s++)?def\s++{re.escape(function.rpartition('.')[2])}\b", re.MULTILINE)
    return ([block for block in blocks if defines.search(block)] or blocks)[-1]


def _verdict(passed: int, total: int, first_failure: JSONMapping | None = None) -> JSONObject:
    if first_failure is None:
        return {"passed": passed, "total": total}
    failure = {key: _clipped(value) for key, value in first_failure.items()}
    return {"passed": passed, "total": total, "first_failure": failure}


def _outcomes(run: SandboxResult, number: int, seconds: float) -> list[JSONObject]:
    """Return the outcome of each call or test function: a `result` or an `error`."""
    outcomes: list[JSONObject] = []
    for line in run.stdout.split("\n")[:-1][:number]:
        try:
            outcome = json.loads(line)
        except (ValueError, RecursionError) as error:  # a solution can return values of any size and depth
            outcome = {"error": f"the result cannot be read: {error}"}
        is_outcome = isinstance(outcome, dict) and outcome.keys() & {"result", "error"}
        outcomes.append(outcome if is_outcome else {"error": "the result cannot be read"})
    cause = outcomes[-1]["error"] if outcomes and "error" in outcomes[-1] else _end_of(run, seconds)
    return outcomes + [{"error": f"not run: {cause}"}] * (number - len(outcomes))


def _end_of(run: SandboxResult, seconds: float) -> str:
    if run.timed_out:
        return f"timed out after {seconds:.3g} s"
    last_words = run.stderr.strip().rpartition("\n")[2]
    return f"ended with exit code {run.exit_code}" + (f": {last_words}" if last_words else " before it was done")


def _clipped(value: object) -> str | int:
    if isinstance(value, int):
        return value
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text[:500].encode(errors="replace").decode()


def _same_output(got: str, expected: str) -> bool:
    """Return whether two outputs have the same words; numbers with a decimal point may differ in the seventh digit."""
    got_words, expected_words = got.split(), expected.split()
    return len(got_words) == len(expected_words) and all(map(_same_word, got_words, expected_words))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if "." not in expected or max(len(got), len(expected)) > 300:  # beyond all floats, which would be one infinity
        return False
    try:
        return math.isclose(float(got), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _same_result(got: object, expected: object) -> bool:
    """Return whether two JSON values are equal; some datasets wrap the expected value in a list of one."""
    return _same_value(got, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _same_value(got, expected[0])
    )


def _same_value(got: object, expected: object) -> bool:
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(_same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same_value(got[key], expected[key]) for key in expected)
    if isinstance(got, float) and isinstance(expected, int | float):
        with suppress(OverflowError):  # an integer beyond all floats
            return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(got == expected)


@dataclass(frozen=True)
class InputTests:
    """Tests of a program: standard input, and the expected standard output."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class CallTests:
    """Tests of a function or a method of `Solution`: arguments, and the expected result."""

    fn_name: str
    cases: list[tuple[list[object], object]]


@dataclass(frozen=True, kw_only=True)
class ProgramTests:
    """Python that raises if the solution is wrong, and the functions in it that are called after it has run."""

    code: str
    functions: tuple[str, ...]
    candidate: str | None
    """The expression that is passed to `check(candidate)`."""


Tests: TypeAlias = InputTests | CallTests | ProgramTests


def read_tests(task: Task) -> Tests:
    """Return the tests in the task's `ground_truth`, `tests`, `test` or `input_output`, which may be JSON text.

    Forms: `{"inputs": [...], "outputs": [...]}` with or without `fn_name` (APPS, TACO); a list of `{"input": ...,
    "output": ...}` with or without a function's name (LiveCodeBench, Code Contests); Python with `assert`,
    `check(candidate)`, `test_...` functions or classes of tests, or a list of such statements (HumanEval, MBPP,
    LeetCode, KodCode, BigCodeBench).

    Raises:
        RewardError: if there are no tests, or they have none of these forms.
    """
    tests = _decoded(plain_value(field_of(task, "ground_truth", "tests", "test", "input_output", reward=NAME)))
    if isinstance(tests, Mapping) and "functional" in tests:
        tests = tests["functional"]
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not inputs or len(inputs) != len(outputs):
            raise RewardError(
                f"{NAME} needs as many outputs as inputs, at least one; it got {len(outputs)} and {len(inputs)}"
            )
        return _cases(list(zip(inputs, outputs, strict=True)), tests.get("fn_name") or task.get("fn_name"))
    if isinstance(tests, list) and tests and all(isinstance(item, Mapping) for item in tests):
        for item in tests:
            if not {"input", "output"} <= item.keys():
                raise RewardError(f"{NAME} needs 'input' and 'output' in every test; one has {sorted(map(str, item))}")
        pairs = [(item["input"], item["output"]) for item in tests]
        return _cases(pairs, _fn_name(tests[0]) or _fn_name(task))
    if isinstance(tests, list) and tests and all(isinstance(item, str) for item in tests):
        tests = "\n".join(tests)
    if isinstance(tests, str) and tests.strip():
        return _program(tests, task.get("entry_point"))
    raise RewardError(f"{NAME} needs input-output pairs or Python as tests, not {tests!r:.200}")


def _decoded(value: object) -> object:
    """Return the value of JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        decoded: object = json.loads(value)
    except ValueError:  # Python, or plain text
        return value
    return decoded


def _fn_name(item: JSONMapping) -> str | None:
    metadata = _decoded(item.get("metadata"))
    inner = metadata if isinstance(metadata, Mapping) else {}
    return item.get("fn_name") or inner.get("fn_name") or inner.get("func_name")


def _cases(pairs: list[tuple[object, object]], fn_name: str | None) -> Tests:
    if fn_name is None:
        return InputTests([(_text(given), _text(expected)) for given, expected in pairs])
    return CallTests(fn_name=fn_name, cases=[_call(given, expected) for given, expected in pairs])


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _call(given: object, expected: object) -> tuple[list[object], object]:
    """Return the arguments and the result of a call.

    The arguments are a list, or text with the JSON of one on each line. The result may then be JSON, too; with a list,
    text is the result itself.
    """
    if isinstance(given, str):
        arguments = [_decoded(line.removesuffix("\r")) for line in given.split("\n") if line.strip()]
    elif isinstance(given, list | tuple):
        arguments = list(given)
    else:
        raise RewardError(f"{NAME} needs the arguments of a call as a list or as lines of JSON, not {given!r:.200}")
    if isinstance(expected, str):
        return arguments, _decoded(expected) if isinstance(given, str) else expected
    return arguments, json.loads(json.dumps(expected))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _program(code: str, entry_point: str | None) -> ProgramTests:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise RewardError(f"{NAME} cannot read the task's tests as Python: {error}") from None
    body = tree.body
    defined = [node for node in body if isinstance(node, _FUNCTIONS)]
    functions = tuple(node.name for node in defined if node.name.startswith("test_"))
    functions += tuple(name for node in body if isinstance(node, ast.ClassDef) for name in _methods(node))
    for node in defined:
        if node.name in functions and len(node.args.args) > len(node.args.defaults):
            raise RewardError(f"{NAME} cannot call {node.name}, which takes arguments: fixtures are not supported")
    statements = [node.value for node in body if isinstance(node, ast.Expr)]
    calls_check = any(isinstance(value, ast.Call) and ast.unparse(value.func) == "check" for value in statements)
    if any(node.name == "check" for node in defined) and not calls_check:
        if not entry_point:
            raise RewardError(f"{NAME} needs the task's field 'entry_point': the function to pass to check(candidate)")
        functions = ("check", *functions)
    if not (functions or any(map(_runs, body))) or not any(map(_checks, ast.walk(tree))):
        raise RewardError(
            f"{NAME} found no assert that runs in the task's tests {code!r:.200}: every solution would pass; compare "
            "results, as in `assert add(1, 2) == 3`"
        )
    return ProgramTests(code=code, functions=functions, candidate=entry_point if functions[:1] == ("check",) else None)


def _methods(node: ast.ClassDef) -> list[str]:
    """Return the tests in a class for unittest or pytest, as `Class.method`."""
    is_test = node.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    methods = [item.name for item in node.body if isinstance(item, _FUNCTIONS) and item.name.startswith("test")]
    return [f"{node.name}.{name}" for name in methods] if is_test else []


def _runs(node: ast.stmt) -> bool:
    """Return whether a statement may check something; definitions, and code for a main program only, cannot."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return False
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return False
    return any(isinstance(part, ast.Assert | ast.Call | ast.Raise) for part in ast.walk(node))


_CHECKERS = ("assert", "fail", "raises", "warns", "exit", "_exit", "quit", "eq_", "ok_", "check", "verify", "testmod")
"""Beginnings of the names of functions that raise, or end the program, for a wrong result."""


def _checks(node: ast.AST) -> bool:
    """Return whether a part of a test can find a wrong result: an assertion, a call of a checker, or a `raise`."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant) or not node.test.value
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2].lower().startswith(_CHECKERS)
    return isinstance(node, ast.Raise)
