"""The reward for programs: the last block of Python passes every test, in the sandbox."""

from __future__ import annotations

import json
import math
import re
import reprlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.rewards.code_peer import ENDED
from rllm.rewards.code_tests import CallTests, InputTests, ProgramTests, Tests, read_tests
from rllm.rewards.reading import after_thinking, python_blocks, text_of_action
from rllm.rewards.reward_types import RewardConfig, RewardInput, RewardOutput
from rllm.rewards.reward_types import RewardType as RewardType
from rllm.tools.sandbox import SandboxResult, run_judged, run_python
from rllm.types import Task

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
    """Judges a text by the last closed block of Python in it, which must pass every test; `read_tests` says where they
    are. Where the tests call a function it is the last block that defines it, if there is one: examples of its use may
    follow.

    No verdict is formed in a process that executes the solution, so that nothing which a solution does to its own
    process can win. Outputs and results of calls are compared outside the sandbox, which never has what is expected.
    Tests that are Python run in a second sandbox; there a solution's functions and objects stand for those in the
    first, of which plain values are copies. Such tests are as strict as they are written: they pass if the solution's
    answers, given in plain values or by methods that the tests call, are those that they ask for. So these remain the
    solution's to decide: helper functions that the tests use but neither define nor import from elsewhere, and
    comparisons of two of its own objects. A comparison of its own object with a plain value is an error.

    Whatever the solution does earns a reward; a sandbox that could not be set up raises, which leaves the answer
    unscored. The metadata has `passed` and `total`, and the `first_failure`; programs that read standard input are not
    run again after it.
    """

    config: RewardConfig = field(default_factory=RewardConfig)
    timeout_s: float = 10.0
    """For each run: of one input, or of all calls."""
    deadline_s: float = 60.0
    """For all runs together."""
    memory_mb: int = 512

    def __call__(self, task_info: Task | RewardInput, action: Any = None) -> RewardOutput:
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
        verdict = self._run(_solution_in(blocks, tests), tests)
        reward = self.config.correct_reward if verdict.all_passed else self.config.incorrect_reward
        return RewardOutput(reward, verdict.metadata, verdict.all_passed)

    def _run(self, solution: str, tests: Tests) -> _Verdict:
        match tests:
            case InputTests():
                return self._run_inputs(solution, tests)
            case CallTests():
                return self._run_calls(solution, tests)
            case ProgramTests():
                return self._run_program(solution, tests)

    def _run_inputs(self, solution: str, tests: InputTests) -> _Verdict:
        end, total = time.monotonic() + self.deadline_s, len(tests.cases)
        for index, (stdin, expected) in enumerate(tests.cases):
            seconds = min(self.timeout_s, end - time.monotonic())
            if seconds <= 0:
                return _Verdict(index, total, {"test": index, "error": f"not finished in {self.deadline_s:g} s"})
            max_bytes = 64_000 + 4 * len(expected)  # no character takes more
            run = run_python(
                solution, stdin=stdin, timeout_s=seconds, memory_mb=self.memory_mb, max_output_bytes=max_bytes
            )
            if not run.ok or not _same_output(run.stdout, expected):
                outcome = {"got": run.stdout} if run.ok else {"error": _end_of(run, seconds)}
                return _Verdict(index, total, {"test": index, "input": stdin, "expected": expected, **outcome})
        return _Verdict(total, total, None)

    def _run_calls(self, solution: str, tests: CallTests) -> _Verdict:
        job = {"solution": solution, "fn_name": tests.fn_name, "calls": [arguments for arguments, _ in tests.cases]}
        run = run_python(
            _HARNESS,
            stdin=json.dumps(job),
            timeout_s=self._seconds,
            memory_mb=self.memory_mb,
            max_output_bytes=MAX_REPORT_BYTES,
        )
        outcomes = _outcomes(run.stdout, len(tests.cases), _end_of(run, self._seconds))
        failures = []
        for index, (outcome, (arguments, expected)) in enumerate(zip(outcomes, tests.cases, strict=True)):
            if "error" in outcome or not _same_result(outcome["result"], expected):
                got = {"error": outcome["error"]} if "error" in outcome else {"got": outcome["result"]}
                failures.append({"test": index, "input": arguments, "expected": expected, **got})
        return _Verdict.of(failures, len(tests.cases))

    def _run_program(self, solution: str, tests: ProgramTests) -> _Verdict:
        names = tests.functions or ("the assertions",)
        job = {"tests": tests.code, "functions": tests.functions, "candidate": tests.candidate}
        run, solution_run = run_judged(
            _HARNESS,
            _HARNESS,
            stdin=json.dumps(job),
            judged_stdin=json.dumps({"solution": solution}),
            timeout_s=self._seconds,
            memory_mb=self.memory_mb,
            max_output_bytes=MAX_REPORT_BYTES,
        )
        outcomes = _outcomes(run.stdout, len(names), _end_of(run, self._seconds))
        ended = f"not run: {_end_of(solution_run, self._seconds)}"
        failures = [
            {"test": name, "error": ended if outcome["error"] == ENDED else outcome["error"]}
            for name, outcome in zip(names, outcomes, strict=True)
            if "error" in outcome
        ]
        return _Verdict.of(failures, len(names))

    @property
    def _seconds(self) -> float:
        return min(self.timeout_s, self.deadline_s)


def _solution_in(blocks: list[str], tests: Tests) -> str:
    called = tests.fn_name if isinstance(tests, CallTests) else None
    if isinstance(tests, ProgramTests):
        called = tests.candidate
    if called is None:
        return blocks[-1]
    defines = re.compile(rf"^[^\S\n]*+(?:async\s++)?def\s++{re.escape(called.rpartition('.')[2])}\b", re.MULTILINE)
    return ([block for block in blocks if defines.search(block)] or blocks)[-1]


@dataclass(frozen=True)
class _Verdict:
    passed: int
    total: int
    first_failure: dict[str, Any] | None

    @classmethod
    def of(cls, failures: list[dict[str, Any]], total: int) -> _Verdict:
        return cls(total - len(failures), total, failures[0] if failures else None)

    @property
    def all_passed(self) -> bool:
        return self.first_failure is None

    @property
    def metadata(self) -> dict[str, Any]:
        failure = {key: _clipped(value) for key, value in (self.first_failure or {}).items()}
        return {"passed": self.passed, "total": self.total, **({"first_failure": failure} if failure else {})}


def _outcomes(report: str, number: int, end: str) -> list[dict[str, Any]]:
    """Return the outcome of each call or test function: a `result` or an `error`."""
    outcomes = [_outcome(line) for line in report.split("\n")[:-1][:number]]
    cause = outcomes[-1]["error"] if outcomes and "error" in outcomes[-1] else end
    return outcomes + [{"error": f"not run: {cause}"}] * (number - len(outcomes))


def _outcome(line: str) -> dict[str, Any]:
    try:
        outcome = json.loads(line)
    except (ValueError, RecursionError) as error:  # what the solution returned can be as large and as deep as it likes
        return {"error": f"the result cannot be read: {error}"}
    if isinstance(outcome, dict) and outcome.keys() & {"result", "error"}:
        return outcome
    return {"error": "the result cannot be read"}


def _end_of(run: SandboxResult, seconds: float) -> str:
    if run.timed_out:
        return f"timed out after {seconds:.3g} s"
    last_words = run.stderr.strip().rpartition("\n")[2]
    return f"ended with exit code {run.exit_code}" + (f": {last_words}" if last_words else " before it was done")


def _clipped(value: Any) -> Any:
    if isinstance(value, int):
        return value
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text[:500].encode(errors="replace").decode()


def _same_output(got: str, expected: str) -> bool:
    """Whether two outputs have the same words; numbers with a decimal point may differ in the seventh digit."""
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


def _same_result(got: Any, expected: Any) -> bool:
    """Whether two JSON values are the same; some datasets wrap what they expect in a list of one."""
    return _same_value(got, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _same_value(got, expected[0])
    )


def _same_value(got: Any, expected: Any) -> bool:
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(_same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same_value(got[key], expected[key]) for key in expected)
    if isinstance(got, float) and isinstance(expected, int | float):
        with suppress(OverflowError):  # an integer beyond all floats
            return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(got == expected)
