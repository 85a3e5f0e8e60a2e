"""Arithmetic that is exact where possible, and refuses expressions that take long: `evaluate("2 * (3 + 4)") == 14`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from rllm.tools.tool_base import Tool, ToolOutput

__all__ = ["Calculator", "evaluate"]

Number: TypeAlias = int | float | Fraction

MAX_CHARS = 1_000
MAX_BITS = 10_000
"""Bits of a number's numerator and denominator together: some 3,000 digits."""
MAX_PLACES = 1_000
"""Decimal places that a number can be rounded to."""

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression in Python's notation.

    Integers and their quotients are exact: an `int` if the value is whole, else a `Fraction`. The result is a float if
    the expression has a decimal point, or if a function or a root leaves the rationals.

    Raises:
        ValueError: if it is not such an expression, has no finite real value, or is too large to evaluate.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip().translate(_SPELLINGS), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError(f"division by zero in {expression!r}") from None
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression: {error.msg}") from None
    except OverflowError:
        raise ValueError(f"a number in {expression!r} is too large") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"the expression is nested too deeply: {expression[:40]!r}...") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes() | None):
            raise ValueError(f"{ast.unparse(node)!r} is not a number")
        case ast.Constant(value=int() | float() as number):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            try:
                return _checked(_FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take these {len(values)} arguments") from None
            except ValueError as error:
                raise ValueError(f"{name}({', '.join(map(str, values))}): {error}") from None
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("'^' is not a power here: write '**'")
    known = ", ".join([*sorted(_FUNCTIONS), *sorted(_CONSTANTS)])
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic: use numbers, + - * / // % **, parentheses, and {known}")


def _checked(number: Number | complex) -> Number:
    if isinstance(number, complex):
        raise ValueError(f"{number} is not a real number")
    if isinstance(number, float):
        if not math.isfinite(number):
            raise ValueError(f"{number} is not a finite number")
        return number
    if _bits(number) > MAX_BITS:
        raise ValueError(f"a number of {_bits(number)} bits is too large; at most {MAX_BITS} are allowed")
    return int(number) if number.denominator == 1 else Fraction(number)


def _bits(number: int | Fraction) -> int:
    return number.numerator.bit_length() + number.denominator.bit_length() - 1


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, float) or isinstance(right, float):
        return float(left) / float(right)
    return Fraction(left) / right


def _power(base: Number, exponent: Number) -> Number | complex:
    if isinstance(base, float) or not isinstance(exponent, int):
        power: float | complex = float(base) ** float(exponent)
        return power
    if abs(base) != 1 and _bits(base) * abs(exponent) > 2 * MAX_BITS:  # checked before it is computed
        raise ValueError(f"a power with exponent {exponent} is too large; at most {MAX_BITS} bits are allowed")
    return Fraction(base) ** exponent


def _factorial(number: Number) -> Number:
    if not isinstance(number, int) or not 0 <= number <= MAX_BITS // 10:
        raise ValueError(f"factorial({number}): the argument must be a whole number from 0 to {MAX_BITS // 10}")
    return math.factorial(number)


def _round(number: Number, places: int | None = None) -> Number:
    if places is not None and not -MAX_PLACES <= places <= MAX_PLACES:  # `10 ** places` is computed
        raise ValueError(f"the places must be from {-MAX_PLACES} to {MAX_PLACES}")
    return round(number, places)


def _root(number: Number) -> Number:
    if number < 0:
        raise ValueError(f"sqrt({number}) is not real")
    if isinstance(number, int) and math.isqrt(number) ** 2 == number:
        return math.isqrt(number)
    return math.sqrt(number)


_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number | complex]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": _round,
    "sin": math.sin,
    "sqrt": _root,
    "tan": math.tan,
}


Expression = Annotated[
    str, Field(description="numbers, + - * / // % **, parentheses, and functions such as sqrt, log, min and max")
]


class Calculator(Tool):
    """Work out an arithmetic expression, for example `(17 + 3) * 2 ** 5 / 7`."""

    def __init__(self, name: str = "calculator", description: str | None = None) -> None:
        super().__init__(name, description)

    def forward(self, expression: Expression) -> ToolOutput:
        """Return the value, or the reason why there is none."""
        try:
            value = evaluate(expression)
        except ValueError as error:
            return ToolOutput(name=self.name, error=str(error))
        return ToolOutput(name=self.name, output=float(value) if isinstance(value, Fraction) else value)
