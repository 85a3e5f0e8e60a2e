from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.tools.calculator import evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("-7 // 2", -4),
        ("1 / 3 * 3", 1),
        ("1 / 3", Fraction(1, 3)),
        ("6 ÷ 2 × 5 − 1", 14),
        ("2 ** -2", Fraction(1, 4)),
        ("(2/3) ** 2", Fraction(4, 9)),
        ("0.5 + 1/4", 0.75),
        ("2 ** 0.5", 2**0.5),
        ("2 ** (1/2)", 2**0.5),
        ("sqrt(49)", 7),
        ("sqrt(2)", 2**0.5),
        ("max(3, 7) - min(3, 7)", 4),
        ("factorial(5)", 120),
        ("round(2.6)", 3),
        ("round(1/3, 2)", Fraction(33, 100)),
        ("round(1234, -2)", 1200),
        ("(-1) ** 1000000007", -1),
        ("2 ** 2000 // 2 ** 1999", 2),
        (" 7 ", 7),
    ],
)
def test_expressions_have_exact_values(expression: str, value: int | float | Fraction) -> None:
    result = evaluate(expression)

    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("2 ^ 3", r"write '\*\*'"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "sqrt"),
        ("log(0)", "log"),
        ("sin(1, 2)", "2 arguments"),
        ("1e999", "not a finite"),
        ("1e200 * 1e200", "not a finite"),
        ("True + 1", "not a number"),
        ("'a' * 9", "not a number"),
        ("1,000", "not arithmetic"),
        ("x + 1", "not arithmetic"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("(1).real", "not arithmetic"),
    ],
)
def test_invalid_arithmetic_is_rejected_with_the_reason(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "9**9**9",
        "(1/9)**10**9",
        "9**-10**9",
        "*".join(["9**9**4"] * 40),
        "factorial(10**6)",
        "factorial(factorial(20))",
        "round(5, -10**9)",
        "round(1/3, 10**9)",
        "exp(10**9)",
        "10.0 ** 400",
        "1.0 * 9**3000",
        "9" * 1_001,
        "-" * 999 + "1",
        "(" * 400 + "1" + ")" * 400,
    ],
)
def test_expensive_expressions_are_rejected(expression: str) -> None:
    with pytest.raises(ValueError, match=r"large|deeply|nested|characters|factorial|places"):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%()., esqrtlogmax!\x00"))
def test_any_text_gives_a_value_or_a_value_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ValueError:
        return
    assert isinstance(value, int | float | Fraction)
