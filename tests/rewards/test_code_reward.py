import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.errors import RewardError
from rllm.rewards.code_reward import RewardCodeFn
from rllm.rewards.reward_fn import code_reward_fn
from rllm.rewards.reward_types import RewardOutput
from rllm.types import Action

pytestmark = pytest.mark.sandbox

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [20, 22]], "outputs": [3, 42]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n",
    "entry_point": "add",
}
TEST_FUNCTIONS = "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\ndef test_zero():\n    assert add(0, 0) == 0\n"


def judged(tests: Any, code: str, **limits: Any) -> RewardOutput:
    task = tests if isinstance(tests, dict) and "test" in tests else {"ground_truth": tests}
    return RewardCodeFn(**limits)(task, f"Here it is:\n```python\n{code}\n```\nDone.")


def test_program_is_scored_by_its_output() -> None:
    verdict = judged(DOUBLE, "print(2 * int(input()))")
    assert verdict == RewardOutput(1.0, {"passed": 2, "total": 2}, is_correct=True)


def test_first_failure_is_reported() -> None:
    verdict = judged(DOUBLE, "print(2)")
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    failure = {"test": 1, "input": "21\n", "expected": "42\n", "got": "2\n"}
    assert verdict.metadata == {"passed": 1, "total": 2, "first_failure": failure}


@pytest.mark.parametrize(
    ("expected", "printed", "reward"),
    [
        ("1 2\n3", "1 2 \n3\n\n", 1.0),
        ("0.333333333", "0.3333333", 1.0),
        ("0.333333333", "0.3333", 0.0),
        ("3", "3.0", 0.0),
        ("yes", "YES", 0.0),
        ("1", "1 1", 0.0),
        ("1 2", "1 3", 0.0),
        ("1" * 350 + ".0", "2" * 350 + ".0", 0.0),
    ],
)
def test_outputs_are_compared_word_for_word(expected: str, printed: str, reward: float) -> None:
    assert judged({"inputs": [""], "outputs": [expected]}, f"print({printed!r})").reward == reward


def test_long_output_is_read_to_its_end_in_any_script() -> None:
    length = 70_000
    assert judged({"inputs": [""], "outputs": ["𝄞" * length]}, f"print('𝄞' * {length})").reward == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        ADD,
        json.dumps(ADD),
        {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}],
        [{"input": [1, 2], "output": 3, "type": "function_call", "fn_name": "add"}],
        CHECK,
        {"functional": CHECK["test"] + "\ncheck(add)"},
        TEST_FUNCTIONS,
        ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "for n in range(3):\n    assert add(n, n) == 2 * n",
        "if add(1, 2) != 3:\n    quit(1)",
    ],
)
def test_all_published_formats_of_function_tests_are_run(tests: Any) -> None:
    assert judged(tests, "def add(a, b):\n    return a + b").reward == 1.0
    assert judged(tests, "def add(a, b):\n    return a - b").reward == 0.0


def test_pairs_without_a_function_test_a_program() -> None:
    tests = [{"input": "1\n2", "output": "3", "testtype": "stdin"}]
    assert judged(tests, "print(int(input()) + int(input()))").reward == 1.0


def test_solution_method_has_the_usual_imports() -> None:
    code = "class Solution:\n    def add(self, numbers: List[int]) -> int:\n        return Counter(numbers).total()"
    assert judged({"fn_name": "add", "inputs": [[[1, 1]]], "outputs": [2]}, code).reward == 1.0
    task = {"test": "def check(candidate):\n    assert candidate(numbers=[1]) == 1\n", "entry_point": "Solution().add"}
    assert judged(task, code).reward == 1.0


@pytest.mark.parametrize("tests", [{**ADD, "fn_name": "gcd"}, {**CHECK, "entry_point": "gcd"}])
def test_imported_function_is_not_a_solution(tests: Any) -> None:
    assert judged(tests, "").reward == 0.0


def test_method_may_be_named_like_an_imported_function() -> None:
    code = "class Solution:\n    def gcd(self, a, b):\n        return a + b"
    assert judged({**ADD, "fn_name": "gcd"}, code).reward == 1.0


def test_tuples_equal_lists_and_floats_are_compared_approximately() -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [[1, 0.3, {"1": "x"}]]}
    assert judged(tests, "def f():\n    print('noise')\n    return 1, 0.1 + 0.2, {1: 'x'}").reward == 1.0
    assert judged(tests, "def f():\n    return 1, 0.1 + 0.2, {1: 'y'}").reward == 0.0
    assert judged(tests, "def f():\n    return 1, 0.31, {1: 'x'}").reward == 0.0
    assert judged({**tests, "outputs": [0]}, "def f():\n    return 0.1 + 0.2 - 0.3").reward == 1.0


@pytest.mark.parametrize(
    ("given", "expected", "reward"), [([12], "12", 1.0), ('"12"', '"12"', 1.0), ([12], 12, 0.0), ("12", "12", 0.0)]
)
def test_text_result_is_parsed_like_the_arguments(given: Any, expected: Any, reward: float) -> None:
    tests = {"fn_name": "f", "inputs": [given], "outputs": [expected]}
    assert judged(tests, "def f(n):\n    return str(n)").reward == reward


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_only_a_newline_ends_a_line(character: str, ascii_only: bool) -> None:
    text = f"two{character}parts"
    given = json.dumps(text, ensure_ascii=ascii_only)
    measured = {"fn_name": "f", "inputs": [f"{given}\r\n3\n"], "outputs": [json.dumps(len(text) + 3)]}
    assert judged(measured, "def f(text, number):\n    return len(text) + number").reward == 1.0
    echoed = {"fn_name": "f", "inputs": [given], "outputs": [given]}
    assert judged(echoed, "def f(text):\n    return text").reward == 1.0
    if character != "\r":  # which `input` treats as the end of a line
        printed = {"inputs": [f"{text}\n1\n"], "outputs": [f"{len(text)} 1\n"]}
        assert judged(printed, "print(len(input()), input())").reward == 1.0


def test_arrays_are_compared_at_every_depth() -> None:
    arguments = np.empty(2, dtype=object)
    arguments[:] = [np.array([1, 2]), np.array([20, 22])]
    tests = {"fn_name": "add", "inputs": arguments, "outputs": np.array([3, 42])}
    assert judged(tests, "def add(a, b):\n    return a + b").reward == 1.0


@pytest.mark.parametrize(
    ("returned", "expected", "reward"),
    [
        ("np.int64(3)", 3, 1.0),
        ("np.array([0, 1])", [0, 1], 1.0),
        ("[np.float32(0.5), np.bool_(True)]", [0.5, True], 1.0),
        ("range(2)", [0, 1], 1.0),
        ("np.int64(4)", 3, 0.0),
        ("np.array([1, 0])", [0, 1], 0.0),
        ("object()", [], 0.0),
    ],
)
def test_numpy_result_equals_a_python_one(returned: str, expected: Any, reward: float) -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
    assert judged(tests, f"import numpy as np\n\ndef f():\n    return {returned}").reward == reward


def test_passed_calls_are_counted_beyond_the_first_failure() -> None:
    tests = {"fn_name": "f", "inputs": [[1], [0], [2]], "outputs": [1, 1, 0.5]}
    metadata = judged(tests, "def f(n):\n    return 1 / n").metadata
    failure = {"test": 1, "input": "[0]", "expected": 1, "error": "ZeroDivisionError: division by zero"}
    assert metadata == {"passed": 2, "total": 3, "first_failure": failure}


def test_failed_test_function_is_reported_by_name() -> None:
    metadata = judged(TEST_FUNCTIONS, "def add(a, b):\n    return 3").metadata
    assert metadata == {"passed": 1, "total": 2, "first_failure": {"test": "test_zero", "error": "AssertionError: "}}


CHEATS = {
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "def add(a, b):\n    raise SystemExit(0)",
    "exits at once when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "prints the output of a harness": "def add(a, b):\n    print('{\"result\": 3}', 'OK', 'passed')",
    "equals everything": "class Any(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()",
    "equals everything, inside": "class Any:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return [Any()]",
    "equals everything, as a library's": "from unittest.mock import ANY\ndef add(a, b):\n    return ANY",
    "equals everything, from a callable": "class Same:\n    def __call__(self, a, b):\n        return self\n    __eq__ = lambda self, other: True\nadd = Same()",
    "equals everything, behind a cache": "class Same:\n    __eq__ = lambda self, other: True\n@functools.cache\ndef add(a, b):\n    return Same()",
    "equals everything, made of text": "names = {}\nexec('class Same:\\n    __eq__ = lambda self, other: True', names)\ndef add(a, b):\n    return names['Same']()",
    "defines the tests": "def add(a, b):\n    return 0\ndef check(candidate):\n    pass\ndef test_small():\n    pass",
    "reads the job": "import sys\nprint(sys.stdin.read(), sys.argv)\ndef add(a, b):\n    return sys.stdin.read()",
    "replaces the harness": "import __main__\n__main__._attempt = __main__._honest = lambda *a: {'result': None}\ndef add(a, b):\n    return 0",
    "writes invalid text": "def add(a, b):\n    return '\\ud800'",
    "raises": "raise KeyboardInterrupt",
    "hides the end": "import sys\nsys.setrecursionlimit(10**5)\ndef add(a, b):\n    x = []\n    for _ in range(5000):\n        x = [x]\n    return x",
    "is not Python": "def add(a, b:",
    "is empty": "",
}


AGAINST_CALLS = [
    "exits at once",
    "exits when called",
    "prints the output of a harness",
    "reads the job",
    "hides the end",
]


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass_assertions(name: str) -> None:
    verdict = judged(CHECK, CHEATS[name])
    assert (verdict.reward, verdict.metadata["passed"]) == (0.0, 0)


@pytest.mark.parametrize("name", [*AGAINST_CALLS, "writes invalid text"])
def test_cheats_do_not_pass_calls(name: str) -> None:
    verdict = judged(ADD, CHEATS[name])
    assert (verdict.reward, verdict.metadata["passed"]) == (0.0, 0)
    assert verdict.metadata["first_failure"].keys() & {"error", "got"}


FORMS = {
    "changes its argument": (
        "def double(rows):\n    for row in rows:\n        row[:] = [2 * n for n in row]\n    rows.append([])",
        "rows = [[1], [2]]\nfirst = rows[0]\nassert double(rows) is None\nassert rows == [[2], [4], []] and first == [2]",
    ),
    "returns its argument": ("def same(items):\n    return items", "items = [1]\nassert same(items) is items"),
    "calls a function of the tests": (
        "def each(function, items):\n    return [function(n) for n in items]",
        "seen = []\nassert each(lambda n: seen.append(n) or n + 1, [1, 2]) == [2, 3] and seen == [1, 2]\n"
        "assert each(len, ['ab']) == [2]",
    ),
    "returns a function": ("def adder(n):\n    return lambda m: n + m", "assert adder(1)(2) == 3"),
    "returns a generator": (
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]\nassert next(count()) == 0",
    ),
    "takes a generator": ("def total(items):\n    return sum(items)", "assert total(n for n in range(4)) == 6"),
    "raises": (
        "class Base(Exception): pass\nclass Empty(Base):\n    def __init__(self, size):\n        super().__init__(f'size {size}')\n"
        "        self.size = size\ndef pop(items):\n    if items is None: raise ValueError('none')\n    raise Empty(len(items))",
        "from solution import Base, Empty\nimport pytest\nwith pytest.raises(ValueError, match='none'):\n    pop(None)\n"
        "with pytest.raises(Base):\n    pop([])\ntry:\n    pop([1])\nexcept Empty as error:\n"
        "    assert error.size == 1 and str(error) == 'size 1'\nelse:\n    assert False",
    ),
    "has classes": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, item): self.items.append(item); return self\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, key): return self.items[key]\n    def __add__(self, other):\n"
        "        both = Stack(); both.items = self.items + other.items; return both\n    def __eq__(self, other): return self.items == other.items",
        "stack = Stack()\nassert isinstance(stack, Stack) and len(stack) == 0\nstack.push(1).push(2)\n"
        "assert list(stack) == [1, 2] and stack[0] == 1 and stack.items == [1, 2] and 2 in stack\n"
        "assert len(stack + stack) == 4 and stack + Stack() == stack and stack != Stack() and stack is not None != stack",
    ),
    "has operators": (
        "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)\n"
        "    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5\n    def __len__(self): return 2\n"
        "    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)\n"
        "    def __lt__(self, other): return abs(self) < abs(other)\n"
        "    def __round__(self, n=0): return Vector(round(self.x, n), round(self.y, n))\n"
        "    def __format__(self, how): return f'{self.x:{how}}/{self.y:{how}}'",
        "v = Vector(1, 2)\nassert v + Vector(2, 4) == Vector(3, 6) and v != Vector(3, 6) and v != None and v < Vector(3, 4)\n"
        "assert abs(Vector(3, 4)) == 5 and len(v) == 2 and sorted([Vector(3, 4), v])[0].x == 1\n"
        "v += Vector(1, 1)\nassert v.x == 2 and round(Vector(1.26, 2), 1).x == 1.3\n"
        "assert f'{v}' == '2/3' and format(v, '.1f') == '2.0/3.0'",
    ),
    "wraps a function": (
        "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*args):\n        return 2 * f(*args)\n    return g",
        "@twice\ndef square(x):\n    'Of x.'\n    return x * x\nassert (square(3), square.__name__, square.__doc__) == (18, 'square', 'Of x.')",
    ),
    "raises errors of a module": (
        "import json\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass Point:\n    x: int\ndef read(text): return json.loads(text)",
        "import json\nfrom dataclasses import FrozenInstanceError\ntry:\n    Point(1).x = 2\n    assert False\nexcept FrozenInstanceError:\n    pass\n"
        "try:\n    read('{')\n    assert False\nexcept json.JSONDecodeError as error:\n    assert 'line 1' in str(error) and error.pos == 1",
    ),
    "adds objects of the tests": (
        "def total(items):\n    return sum(items) - 1",
        "class Number:\n    def __init__(self, n): self.n = n\n    def __radd__(self, other): return other + self.n\nassert total([Number(1), Number(2)]) == 2",
    ),
    "returns special values": (
        "import datetime, decimal, fractions\nfrom collections import *\nPoint = namedtuple('Point', 'x y')\n"
        "def all_of_them():\n    return [Counter('aab'), OrderedDict(a=1), defaultdict(list, {1: [2]}), deque([1], 3), Point(1, 2),\n"
        "        range(3), {1, 2}, frozenset([1]), b'x', 1 + 2j, 2 ** 100, datetime.date(2020, 1, 2), decimal.Decimal('0.1'),\n"
        "        datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1), fractions.Fraction(1, 3)]",
        "import datetime, decimal, fractions\nfrom collections import *\nassert all_of_them() == [Counter('aab'), OrderedDict(a=1), {1: [2]}, deque([1]), (1, 2),\n"
        "    range(3), {1, 2}, frozenset([1]), b'x', 1 + 2j, 2 ** 100, datetime.date(2020, 1, 2), decimal.Decimal('0.1'),\n"
        "    datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1), fractions.Fraction(1, 3)]\n"
        "assert all_of_them()[4].y == 2 and float('nan') not in all_of_them()",
    ),
    "returns arrays": (
        "import numpy as np\ndef twice(a):\n    return 2 * np.asarray(a)",
        "assert np.array_equal(twice(np.array([1, 2])), [2, 4])\nassert twice(np.float64(1)) == 2.0 and twice([1.5]).shape == (1,)",
    ),
    "takes named arguments": (
        "def f(target, operation=0, function=0, self=0, remote=0):\n    return target + operation + function + self + remote",
        "import solution\nfrom solution import *\nassert f(target=1, operation=2, function=3, self=4, remote=5) == solution.f(15)",
    ),
    "waits": ("async def later(n):\n    return n + 1", "import asyncio\nassert asyncio.run(later(1)) == 2"),
    "prints": (
        "def greet(name):\n    print('hello', name)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    greet('you')\nassert out.getvalue() == 'hello you\\n'",
    ),
    "has the name of a builtin": (
        "def sum(a, b):\n    return a + b",
        "assert sum(1, 2) == 3\nassert abs(sum(1, 2)) == 3",
    ),
    "walks objects of the tests": (
        "def total(node):\n    n = 0\n    while node is not None:\n        n += node.value\n        node.seen = True\n        node = node.next\n    return n",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next, self.seen = value, next, False\n"
        "node = Node(1, Node(2))\nassert total(node) == 3 and node.next.seen",
    ),
    "has constants and modules": (
        "import math\nLIMIT = [1]\ndef f():\n    return LIMIT",
        "assert f() == LIMIT == [math.floor(1.5)]",
    ),
}


CLASSES_OF_TESTS = {
    "unittest": "import unittest\nclass Cases(unittest.TestCase):\n    def setUp(self): self.one = 1\n    @classmethod\n"
    "    def setUpClass(cls): cls.two = 2\n    def test_add(self): self.assertEqual(add(self.one, self.two), 3)\n"
    "    def test_error(self):\n        with self.assertRaises(TypeError): add(1)\nif __name__ == '__main__':\n    unittest.main()",
    "unittest, run at once": "import unittest\nclass Cases(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(1, 2), 3)\nunittest.main()",
    "pytest": "class TestAdd:\n    def setup_method(self): self.one = 1\n    def test_add(self): assert add(self.one, 2) == 3",
    "asyncio": "import unittest\nclass Cases(unittest.IsolatedAsyncioTestCase):\n    async def test_add(self): assert add(1, 2) == 3\n"
    "async def test_it(): assert add(1, 2) == 3",
}


@pytest.mark.parametrize("form", CLASSES_OF_TESTS)
def test_test_classes_are_run(form: str) -> None:
    right, wrong = (judged(CLASSES_OF_TESTS[form], f"def add(a, b):\n    return {result}") for result in ("a + b", "0"))
    assert (right.reward, wrong.reward) == (1.0, 0.0), right.metadata
    assert right.metadata["total"] == CLASSES_OF_TESTS[form].count("def test_")


def test_program_may_open_its_input_by_name() -> None:
    assert judged(DOUBLE, "print(2 * int(open('/dev/stdin').read()), file=open('/dev/stdout', 'a'))").reward == 1.0


def test_tests_may_be_inside_a_try_statement() -> None:
    tests = "try:\n    add('x', 2)\n    assert False\nexcept TypeError:\n    pass"
    assert judged([tests], "def add(a, b):\n    return a + b").reward == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_values_of_the_solution_are_passed_to_the_tests(form: str) -> None:
    solution, tests = FORMS[form]
    verdict = judged([tests], solution)
    assert verdict.reward == 1.0, verdict.metadata


def test_object_compared_with_a_plain_value_is_reported() -> None:
    error = judged(CHECK, "class Three:\n    pass\ndef add(a, b):\n    return Three()").metadata["first_failure"][
        "error"
    ]
    assert error.startswith("TypeError: an object of the solution")


def test_class_known_to_the_tests_may_define_equality() -> None:
    code = "class Vector:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, other):\n        return self.x == other.x\ndef make(x):\n    return Vector(x)"
    tests = "from solution import Vector, make\n\ndef test_make():\n    assert make(1) == Vector(1)\n    assert make(1) != Vector(2)"
    assert judged(tests, code).reward == 1.0


def test_return_value_of_a_method_cannot_fake_equality() -> None:
    code = "class Same:\n    __eq__ = lambda self, other: True\nclass Solution:\n    def add(self, a, b):\n        return {}"
    tests = ["assert Solution().add(1, 2) == 3", "assert Solution().add(1, 2) in (3, 4)"]
    assert judged(tests, code.format("a + b")).reward == 1.0
    assert judged(tests, code.format("Same()")).reward == 0.0
    assert judged(tests[1:], code.format("Same()")).reward == 0.0


def test_items_of_a_list_cannot_fake_equality() -> None:
    code = "class Same:\n    __eq__ = lambda self, other: True\ndef both(a, b):\n    return {}"
    tests = ["assert list(both(1, 2)) == [1, 2]", "assert isinstance(both(1, 2), list) and 2 in both(1, 2)"]
    assert judged(tests, code.format("[a, b]")).reward == 1.0
    for test in tests:
        assert judged([test], code.format("[Same(), Same()]")).reward == 0.0


def test_tests_may_look_up_every_item_of_a_large_set() -> None:
    counting = (
        "seen, least = {}, {}\nfor number in range(30_000):\n    if number not in seen and number not in least:\n"
    )
    tests = f"{counting.format('set()', '{}')}        seen.add(number)\n        least[number] = number\nassert add(1, 2) == 3"
    assert judged(tests, "def add(a, b):\n    return a + b").reward == 1.0


@pytest.mark.parametrize("tests", [ADD, CHECK])
def test_verdict_does_not_wait_for_a_running_thread(tests: Any, tmp_path: Path) -> None:
    code = (
        "import threading\ndef work():\n    threading.main_thread().join()\n"
        f"    open({str(tmp_path / 'waited')!r}, 'w')\nthreading.Thread(target=work).start()\ndef add(a, b):\n    return a + b"
    )
    assert judged(tests, code).reward == 1.0
    assert not (tmp_path / "waited").exists()


@pytest.mark.parametrize("tests", [DOUBLE, ADD, CHECK], ids=["program", "calls", "assertions"])
def test_endless_loop_is_stopped(tests: Any) -> None:
    failure = judged(tests, "while True:\n    pass", timeout_s=0.3).metadata["first_failure"]
    assert "timed out after 0.3 s" in failure["error"]


def test_results_before_a_crash_count() -> None:
    code = "import os\ndef add(a, b):\n    return a + b if a == 1 else os._exit(3)"
    failure = {
        "test": 1,
        "input": "[20, 22]",
        "expected": 42,
        "error": "not run: ended with exit code 3 before it was done",
    }
    assert judged(ADD, code).metadata == {"passed": 1, "total": 2, "first_failure": failure}


def test_total_time_of_all_runs_is_limited() -> None:
    tests = {"inputs": [""] * 50, "outputs": ["x"] * 50}
    failure = judged(tests, "import time\ntime.sleep(0.3)\nprint('x')", deadline_s=0.5).metadata["first_failure"]
    assert "timed out" in failure["error"] or "not finished in 0.5 s" in failure["error"]


def test_memory_and_output_are_bounded() -> None:
    assert "MemoryError" in judged(DOUBLE, "x = bytes(1 << 30)", memory_mb=256).metadata["first_failure"]["error"]
    assert judged({"inputs": [""], "outputs": ["x"]}, "print('x' * 10_000_000)").reward == 0.0


@pytest.mark.parametrize("task", [{"ground_truth": ADD}, CHECK])
def test_last_block_that_defines_the_function_is_used(task: dict[str, Any]) -> None:
    def reward_of(*blocks: str) -> float | None:
        return code_reward_fn(task, "\n".join(f"```python\n{block}\n```" for block in blocks)).reward

    right, wrong, example = (
        "def add(a, b):\n    return a + b",
        "def add(a, b):\n    return a - b",
        "print(add(1, 2))  # 3",
    )
    assert reward_of(wrong, right, example) == 1.0
    assert reward_of(right, wrong, example) == 0.0
    assert reward_of(example) == 0.0


@pytest.mark.parametrize("text", ["", "def add(a, b): ...", "```cpp\nint x;\n```", "```python\nnot closed"])
def test_answer_without_a_python_block_is_wrong(text: str) -> None:
    verdict = code_reward_fn({"ground_truth": ADD}, Action(text))
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    assert "block of Python" in verdict.metadata["reason"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "needs the task's field 'ground_truth' or 'tests'"),
        ({"tests": []}, "input-output pairs or Python"),
        ({"tests": 7}, "input-output pairs or Python"),
        ({"tests": {"inputs": [], "outputs": []}}, "at least one"),
        ({"tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, "as many outputs as inputs"),
        ({"tests": [{"input": "1"}]}, r"'input' and 'output' in every test; one has \['input'\]"),
        ({"tests": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, "arguments of a call"),
        ({"tests": "assert ("}, "cannot read the task's tests"),
        ({"tests": "x = 1"}, "found no assert"),
        ({"tests": ["add(1, 2)"]}, "found no assert"),
        ({"tests": "assert True, add(1, 2)"}, "found no assert"),
        ({"tests": "def test_add():\n    add(1, 2)"}, "found no assert"),
        ({"tests": "def helper():\n    assert add(1, 2) == 3"}, "found no assert"),
        ({"tests": "META = {'author': 'x'}\ndef check_it(add):\n    assert add(1, 2) == 3"}, "found no assert"),
        ({"tests": "'Tests.'\ndef helper():\n    assert add(1, 2) == 3"}, "found no assert"),
        ({"tests": "def t():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    t()"}, "found no assert"),
        ({"tests": "def check(candidate): candidate(1, 2)", "entry_point": "add"}, "found no assert"),
        ({"tests": "def check(candidate): ..."}, "'entry_point'"),
        ({"tests": "def test_it(tmp_path): ..."}, "test_it, which takes arguments"),
    ],
)
def test_task_without_usable_tests_is_an_error_instead_of_0(task: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        code_reward_fn(task, "```python\nx = 1\n```")
