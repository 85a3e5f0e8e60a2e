"""An attacker writes the solution: a program that solves nothing must not pass its tests."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from rllm.errors import RewardError
from rllm.rewards.code_reward import RewardCodeFn
from rllm.rewards.reward_types import RewardOutput
from rllm.sandbox.python import run_python

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(bool(run_python("").missing), reason="needs bubblewrap: these attacks harm the machine"),
]

CHECK = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n",
    "entry_point": "add",
}
WRONG = "\ndef add(a, b):\n    return 0\n"


def judged(tests: Any, code: str, **limits: Any) -> RewardOutput:
    task = tests if isinstance(tests, dict) and "test" in tests else {"ground_truth": tests}
    return RewardCodeFn(**limits)(task, f"```python\n{code}\n```")


def test_correct_solution_passes() -> None:
    assert judged(CHECK, "def add(a, b):\n    return a + b").reward == 1.0


EVERY_FD = "for fd in range(64):\n    try: os.write(fd, {line})\n    except OSError: pass\n"
ATTACKS = {
    "patches the report": "import json\njson.dumps = lambda *a, **k: '{\"result\": null}'",
    "patches the parser of the tests": "import ast\nempty = ast.parse('def check(candidate): pass')\nast.parse = lambda *a, **k: empty",
    "patches the compiler of the tests": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: 0).__code__",
    "patches the comparison": "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\nbuiltins.AssertionError = int",
    "hooks imports": "import sys, builtins\nsys.meta_path.insert(0, sys)\nbuiltins.__import__ = lambda *a, **k: sys",
    "reads its job again": "import os\ntry: os.lseek(0, 0, 0)\nexcept OSError: pass\n"
    "secret = os.read(0, 1 << 20)[12:44]\n" + EVERY_FD.format(line="secret + b'{\"result\": null}\\n'"),
    "writes reports to every file": "import os\n" + EVERY_FD.format(line="b'{\"result\": null}\\n' * 9"),
    "reads other processes": "import os, glob\nfor name in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/mem'):\n"
    "    try: open(name, 'r+b', buffering=0).write(b'{\"result\": null}\\n')\n    except OSError: pass",
    "rewrites the frames below": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
    "        if isinstance(value, dict): value.pop('tests', 0); value['error'] = None\n    frame = frame.f_back",
    "rewrites all objects": "import gc\nfor thing in gc.get_objects():\n"
    "    if type(thing) is dict and 'test' in str(list(thing))[:500]: thing['tests'] = 'def check(candidate): pass'",
    "traces": "import sys, threading\ndef trace(frame, event, arg):\n    frame.f_trace_opcodes = False\n    return trace\n"
    "sys.settrace(trace); threading.settrace(trace); sys.setprofile(lambda *a: None)",
    "leaves at the end": "import atexit, os, signal\natexit.register(os._exit, 0)\nsignal.signal(signal.SIGTERM, lambda *a: os._exit(0))",
    "leaves in a thread": "import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()",
    "kills everything": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(os.getpid(), 9)",
    "is what it must equal": "class check(int):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n"
    "    __hash__ = int.__hash__\ndef add(a, b):\n    return check()",
    "is a class named as in the tests": "class candidate:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return candidate()",
    "is a list named as in the tests": "class candidate(list):\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return candidate()",
    "is the tests' candidate": "class add:\n    def __init__(self, a, b): pass\n    __eq__ = lambda self, other: True",
    "answers what equals all": "from unittest.mock import ANY, MagicMock\ndef add(a, b):\n    return MagicMock(__eq__=lambda *a: True)",
    "raises what ends early": "def add(a, b):\n    raise StopIteration",
    "is tests itself": "import sys, types\nsys.modules['tests'] = types.ModuleType('tests')\ndef check(candidate): pass",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_wrong_solution_does_not_pass_python_tests(attack: str) -> None:
    code = ATTACKS[attack]
    verdict = judged(
        CHECK, code if "add" in code.split("(")[0] or "def add" in code or "class add" in code else code + WRONG
    )
    assert (verdict.reward, verdict.metadata["passed"]) == (0.0, 0)


EQUAL = "__eq__ = __ge__ = __le__ = __contains__ = equals = lambda self, other=0: True"
ANYTHING = f"""
class Anything:
    {EQUAL}
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 3
    __sub__ = __rsub__ = __abs__ = __add__ = lambda self, other=0: self
    __float__ = lambda self: 0.0
    __lt__ = __gt__ = __bool__ = lambda self, other=0: True
    __getitem__ = lambda self, key: self
    def __getattr__(self, name):
        if name == '__array_interface__': return {{'shape': (1,), 'typestr': '<i8', 'version': 3, 'data': (1 << 20, False)}}
        raise AttributeError(name)
def add(a, b):
    return Anything()
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3",
        "assert not add(1, 2) != 3",
        "assert 3 == add(1, 2)",
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert abs(3 - add(1, 2)) < 1e-6",
        "assert 2 < add(1, 2) < 4",
        "assert 3 in add(1, 2)",
        "assert add(1, 2) in (3, 4)",
        "assert add(1, 2) in {3: 4}",
        "assert [add(1, 2)] == [3]",
        "assert {'sum': (add(1, 2),)} == {'sum': (3,)}",
        "assert list(map(lambda n: add(n, n) == 2 * n, [1])) == [True]",
        "import math\nassert math.isclose(add(1, 2), 3)",
        "import operator\nassert operator.eq(add(1, 2), 3)",
        "import unittest\nunittest.TestCase().assertEqual(add(1, 2), 3)",
        "import numpy as np\nassert np.array_equal(add(1, 2), [3]) or np.allclose(add(1, 2), 3)",
        "assert isinstance(add(1, 2), int)",
        "assert type(add(1, 2)) is int",
        "assert add(1, 2) is 3",
        "assert f'{add(1, 2)}' == '3'",
        "import copy\nassert copy.deepcopy(add(1, 2)) == 3",
    ],
)
def test_object_with_fake_equality_does_not_pass(test: str) -> None:
    verdict = judged([test], ANYTHING)
    assert (verdict.reward, verdict.metadata["passed"]) == (0.0, 0)


@pytest.mark.parametrize("error", ["StopIteration", "GeneratorExit", "type('Own', (StopIteration,), {})"])
def test_exception_cannot_end_a_loop_of_the_tests(error: str) -> None:
    tests = ["assert all(map(lambda n: add(n, n) == 2 * n, [1, 2]))", "for _ in map(add, [1], [2]): assert False"]
    for test in tests:
        assert judged([test], f"error = {error}\ndef add(a, b):\n    raise error").reward == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import math\nmath.isclose = lambda *a, **k: True",
        "isclose = sqrt = all = len = sorted = lambda *a, **k: True",
        "import builtins\nbuiltins.all = builtins.len = builtins.sorted = lambda *a, **k: True",
    ],
)
def test_solution_cannot_replace_functions_of_the_tests(code: str) -> None:
    tests = [
        "import math\nassert math.isclose(add(1, 2), 3)",
        "from math import isclose\nassert isclose(add(1, 2), 3)",
        "assert add(1, 2) == sqrt(9)",
        "assert all(add(n, n) == 2 * n for n in [1, 2])",
        "assert sorted([add(1, 2), 1]) == [1, 3]",
    ]
    for test in tests:
        assert judged([test], code + WRONG).reward == 0.0


WRITES_TO_THE_TESTS = """
import json, os
def ask(message):
    fd = [fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}') and 'socket' in os.readlink(f'/proc/self/fd/{fd}')][0]
    line = message.encode() + b'\\n'
    while line: line = line[os.write(fd, line):]
    return os.read(fd, 1 << 16)
"""


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("get", ["__globals__"]),
        ("get", ["__code__"]),
        ("eval", ["1"]),
        ("set", ["__code__", None]),
        ("str", []),
        ("no such", []),
    ],
)
def test_functions_of_the_tests_can_only_be_called(operation: str, arguments: list[Any]) -> None:
    test = "assert each(lambda n: n + 1) == 'refused'"
    code = f"""{WRITES_TO_THE_TESTS}
def each(function):
    number = object.__getattribute__(function, '_number')
    request = dict(do={operation!r}, to=number, **{{'with': ['list', [['list', {arguments}], ['dict', []]]]}})
    return 'refused' if b'raise' in ask(json.dumps(request)) else 'permitted'
"""
    assert judged([test], code).reward == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        '{"result": ["pickle", "Y29zCnN5c3RlbQooUydlY2hvJwp0Ui4="], "changed": []}',
        '{"result": ["yours", 1], "changed": []}',
        '{"result": ["class", "__import__"], "changed": []}',
        '{"result": ["range", "x"], "changed": []}',
        '{"result": 3, "changed": [[0, [["list", [["list", [7, 7]]]]]]]}',
        '{"result": {"a": 1}}',
        '{"raise": {"class": 3}}',
        "[1]",
        "3",
        "nonsense",
        "[" * 100_000,
    ],
)
def test_forged_reply_is_rejected(reply: str) -> None:
    code = f"{WRITES_TO_THE_TESTS}\ndef add(a, b):\n    ask({reply!r})\n    return 0"
    verdict = judged(CHECK, code)
    assert verdict.reward == 0.0
    assert "timed out" not in verdict.metadata["first_failure"]["error"]


@pytest.mark.parametrize(
    "result",
    [
        "10 ** 400",
        "1.0",
        "float('nan')",
        "float('inf')",
        "[" * 90 + "]" * 90,
        "{(1, 2): 3}",
        "lambda: 3",
        "(n for n in iter(int, 1))",
        "bytes(300 << 20)",
        "'x' * (5 << 20)",
    ],
)
@pytest.mark.parametrize("expected", [10**400, 3, [[3]], {"a": 3}])
def test_every_result_is_scored(result: str, expected: Any) -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
    verdict = judged(tests, f"def f():\n    return {result}", timeout_s=60 if "iter" not in result else 0.5)
    assert verdict.reward == (1.0 if result == "10 ** 400" and expected == 10**400 else 0.0)


def test_tests_of_a_dataset_run_in_a_sandbox(tmp_path: Any) -> None:
    tests = [f"open({str(tmp_path / 'written')!r}, 'w').close()\nassert add(1, 2) == 3"]
    assert judged(tests, "def add(a, b):\n    return a + b").reward == 0.0
    assert not (tmp_path / "written").exists()


AGREEING_CLASS = ANYTHING.replace("class Anything", "class Add").replace(
    "def add(a, b):\n    return Anything()",
    """    __init__ = lambda self, *numbers: None
    __truediv__ = __rtruediv__ = lambda self, other: 1.0
    __mul__ = __pow__ = __round__ = __float__ = lambda self, *other: 0.0
    __sub__ = __rsub__ = __isub__ = lambda self, other: {difference}
    __len__ = lambda self: 1
    __getitem__ = lambda self, key: [0][key]
    sqrt = conjugate = lambda self: 0.0
    all = any = add = lambda self, *numbers: self
class Solution(Add): pass
""",
)


EXPECTING_3 = [
    "assert {} == 3",
    "assert not {} != 3",
    "assert {} == [3] or {} == (3,)",
    "assert [{}] == [3]",
    "assert {} in (3, 4) or {} in {{3}}",
    "assert {} < 4 or {} > 2 or {} <= 3",
    "assert abs({} - 3) < 1e-6",
    "assert abs(3 - {}) < 1e-6",
    "assert not {} - 3",
    "assert round({} - 3, 6) == 0",
    "assert ({} - 3) ** 2 < 1e-6",
    "assert float({} - 3) == 0",
    "assert abs({} / 3 - 1) < 1e-6",
    "x = {}\nx -= 3\nassert abs(-x) < 1e-6",
    "import numpy as np\nassert np.abs({} - np.array([3])).max() < 1e-6",
    "import numpy as np\nassert np.linalg.norm({} - np.array([3])) < 1e-6",
    "import numpy as np\nassert np.linalg.norm(np.array([3]) - {}) < 1e-6",
    "import unittest\nunittest.TestCase().assertAlmostEqual({}, 3)",
]


@pytest.mark.parametrize("difference", ["0", "self", "Add()"])
@pytest.mark.parametrize("made", ["Add(1, 2)", "Solution().add(1, 2)"])
def test_object_of_a_named_class_equals_no_expected_value(made: str, difference: str) -> None:
    bodies = [textwrap.indent(test.format(*[made] * 3), "    ") for test in EXPECTING_3]
    tests = "".join(f"def test_{number}():\n{body}\n" for number, body in enumerate(bodies))
    verdict = judged(tests, AGREEING_CLASS.replace("{difference}", difference))
    assert verdict.metadata["passed"] == 0
    assert "timed out" not in verdict.metadata["first_failure"]["error"]


@pytest.mark.parametrize("method", ["equals", "issubset", "startswith", "isclose"])
def test_methods_of_a_result_cannot_fake_equality(method: str) -> None:
    code = f"class Same:\n    {method} = lambda self, other: True\ndef add(a, b):\n    return Same()"
    for test in f"assert add(1, 2).{method}('3')", f"same = add(1, 2).{method}\nassert same([3])":
        assert judged([test], code).reward == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "import unittest\n{}\nunittest.main(argv=[''], exit=False)",
        "import unittest\n{}\nif __name__ == '__main__':\n    unittest.main()",
        "import unittest\n{}\nassert True",
        "'''Tests of add.'''\nimport unittest\n{}",
    ],
)
def test_empty_test_run_does_not_pass(tests: str) -> None:
    case = "class TestAdd(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)"
    assert judged(tests.format(case), "def add(a, b):\n    return a + b").reward == 1.0
    for wrong in WRONG, "import unittest\ndef add(a, b):\n    raise unittest.SkipTest('not today')":
        assert judged(tests.format(case), wrong).reward == 0.0


def test_docstring_is_not_a_test() -> None:
    with pytest.raises(RewardError):
        judged("'''Tests of add.'''", WRONG)


@pytest.mark.parametrize("before", ["import numpy as np\n", ""])
def test_star_import_of_a_solution_replaces_no_module(before: str) -> None:
    test = f"{before}from solution import *\nassert np.allclose(add(1, 2), 3)"
    assert judged([test], "import numpy as np\ndef add(a, b):\n    return a + b").reward == 1.0
    for attack in "import numpy as np\nnp.allclose = lambda *a: True", "class np:\n    allclose = lambda *a: True":
        assert judged([test], attack + WRONG).reward == 0.0
