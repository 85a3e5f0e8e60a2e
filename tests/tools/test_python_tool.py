import asyncio
import re

import pytest

from rllm.tools.calculator import Calculator
from rllm.tools.python_tool import PythonInterpreter


async def test_output_is_what_is_printed_and_the_last_value() -> None:
    output = await PythonInterpreter().call({"code": "print('hi')\n1 + 1"})

    assert str(output) == output.to_string() == "hi\n2\n"
    assert output.metadata is not None
    assert output.metadata["exit_code"] == 0


def test_error_follows_the_printed_output() -> None:
    output = PythonInterpreter()(code="print('before')\n1 / 0")

    assert output.output is None
    assert output.to_string().startswith("before\nError: Traceback")
    assert output.to_string().endswith("ZeroDivisionError: division by zero\n")


def test_code_can_read_its_own_source() -> None:
    code = "import inspect, sys, traceback\ndef f():\n    1 / 0  # here\ntry:\n    f()\nexcept ZeroDivisionError:\n    traceback.print_exc(file=sys.stdout)\n"
    output = PythonInterpreter()(code=code + "print(inspect.getsource(f))")
    assert output.to_string().count("1 / 0  # here") == 2


async def test_hanging_program_error_names_its_deadline() -> None:
    tool = PythonInterpreter(timeout_s=0.3)

    outputs = await asyncio.gather(*(tool.call({"code": "import time; time.sleep(600)"}) for _ in range(2)))

    assert [output.error for output in outputs] == ["the code did not end within 0.3 seconds"] * 2


@pytest.mark.parametrize(("then", "ending"), [("", ""), ("; 1 / 0", "\nError: Traceback")])
def test_long_output_is_truncated_with_a_note(then: str, ending: str) -> None:
    text = PythonInterpreter(max_output_chars=1_000)(code="print('x' * 100_000)" + then).to_string()

    assert re.match(rf"x{{900,1000}}\n\[cut: the code printed more than is kept\]{ending}", text)
    assert text.count("[cut:") == 1


def test_calculator_returns_a_number_or_a_reason() -> None:
    assert Calculator()(expression="7 / 2").to_string() == "3.5"
    assert Calculator()(expression="8 / 2").to_string() == "4"
    assert Calculator()(expression="1 / 0").to_string() == "Error: division by zero in '1 / 0'"
