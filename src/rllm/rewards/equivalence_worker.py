r"""Program that compares mathematical answers: it reads and writes lines of JSON, and is killed at its deadline.

SymPy can take forever over nine characters (`9^{9^{9^9}}`), in C code that no exception interrupts and no thread can
leave. So the alarm keeps its default action here, which is to kill the process; the caller sees the end of the stream.
`rllm.rewards.math_reward` runs it as a `Worker`; it imports nothing of ours.

math-verify reads the answers and takes sets, intervals, equations and matrices apart; values are compared here, because
it would treat numbers that differ by less than 1e-15 as equal, such as `1/2^{99}` and `1/2^{98}`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Expr, MatrixBase

START_DEADLINE_S = 30.0
MAX_SLOWDOWN = 10
"""Multiple of the deadline, in wall-clock time, after which the process is killed in any case."""
MAX_COMPARISONS = 1000
"""Number after which the process is replaced: SymPy's caches grow."""

MAX_DIGITS = 1000
"""Precision up to which a difference is searched for, before equality has to be proven."""
_PLACES = 6
_SMALL, _CLOSE = Fraction(1, 10**4), Fraction(1, 10**6)

_UNIT = r"\\(?:text|mbox)\{[^{}]*\}(?:\^\{?-?\d\}?|\{\^\d\})?"
_UNITS = re.compile(rf"{_UNIT}(?:(?:\s|/|\\cdot|\\[, ])*{_UNIT})*$")


def main() -> None:
    """Answer requests until the input ends."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    _set_alarm(START_DEADLINE_S)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # parsers print to stdout

    def reply(**values: bool | None) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    logging.disable()
    are_equal = _comparison()
    _set_alarm(0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in 1, 2:
        os.dup2(nowhere, stream)
    reply(ready=True)
    for number, line in enumerate(sys.stdin, start=1):
        request = json.loads(line)
        _set_alarm(request["deadline_s"])
        try:
            equal = are_equal(request["gold"], request["answer"])
        except Undecided:
            equal = None
        _set_alarm(0)
        reply(equal=equal, last=number == MAX_COMPARISONS)


def _set_alarm(cpu_s: float) -> None:
    """Have the process killed after `cpu_s` of CPU time, so that no verdict depends on other load; 0 cancels."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, MAX_SLOWDOWN * cpu_s)


def _comparison() -> Callable[[str, str], bool]:
    import math_verify.grader
    import math_verify.parser
    from latex2sympy2_extended import math_normalization
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import LatexExtractionConfig, parse, verify

    # By default R and r are one symbol, and `R - r` is 0.
    math_verify.parser.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))
    # By default `3 \text{ h } 4 \text{ min}` is cut after the 3, as if the rest were one unit.
    math_normalization.unit_superscript_regex = _UNITS
    # By default expressions are equal when their difference evaluates to less than 1e-15.
    math_verify.grader.sympy_numeric_eq = lambda gold, answer, *_: _are_same(gold, answer)
    math_verify.grader.sympy_symbolic_eq = lambda *_: False
    latex = (LatexExtractionConfig(boxed_match_priority=0),)  # the other kind evaluates text as Python

    def are_equal(gold: str, answer: str) -> bool:
        parsed = [parse(rf"\boxed{{{text}}}", latex, parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(*parsed, timeout_seconds=None))

    return are_equal


class Undecided(BaseException):
    """Numbers that could be proven neither equal nor different; not an `Exception`, since math-verify catches those."""


def _are_same(gold: Expr | MatrixBase, answer: Expr | MatrixBase) -> bool:
    """Return whether two expressions are equal, elementwise for matrices.

    Raises:
        Undecided: if they agree in all digits computed, and no proof of equality was found.
    """
    from sympy import MatrixBase, expand_trig, simplify, sin

    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        one, other = gold.doit(), answer.doit()
        return bool(one.shape == other.shape and all(map(_are_same, one.flat(), other.flat())))
    one, other = map(_exactly, (gold, answer))
    is_decimal = _is_decimal(gold) or _is_decimal(answer)
    if not is_decimal and _differ(one, other):
        return False  # before anything huge, such as 9^{9^9}, is written out
    one, other = one.doit(), other.doit()
    if one == other:
        return True
    if one.is_finite is False or other.is_finite is False:
        return False
    if is_decimal and one.is_extended_real and other.is_extended_real:
        return _agree(one, other)
    difference = simplify(one - other)
    equal = difference.equals(0)
    if equal is None and difference.is_number:
        # A difference of arcs: if it is close to 0, a sine of 0 proves that it is 0.
        if abs(difference.evalf()) > 1 or simplify(expand_trig(sin(difference))) != 0:
            raise Undecided
        return True
    return bool(equal)


def _differ(one: Expr, other: Expr) -> bool:
    """Return whether two numbers differ in a digit that is certain; `False` proves nothing."""
    from sympy import Integral, Limit, Product, Sum

    if not (one.is_number and other.is_number) or (one - other).has(Integral, Limit, Product, Sum):
        return False
    parts = (one - other).evalf(15, maxn=MAX_DIGITS).as_real_imag()
    return any(part.is_Float and part._prec > 1 and part != 0 for part in parts)


def _exactly(expr: Expr) -> Expr:
    """Return the expression with decimals as exact fractions, and with real odd roots.

    SymPy uses the complex principal root of a negative number.
    """
    from sympy import Float, Rational

    return expr.xreplace({number: Rational(str(number)) for number in expr.atoms(Float)}).replace(
        lambda part: (
            part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and part.exp.q % 2 and part.base.is_negative
        ),
        lambda part: (-1) ** part.exp.p * (-part.base) ** part.exp,
    )


def _is_decimal(expr: Expr) -> bool:
    r"""Return whether this is a number in decimals, alone or times a power of ten: `0.5`, `-1.6 \cdot 10^{-19}`."""
    from sympy import Float, Mul, Number, Pow

    if not isinstance(expr, Mul):
        return isinstance(expr, Float)
    factors = [factor for factor in expr.args if not (isinstance(factor, Pow) and factor.base == 10)]
    return all(isinstance(factor, Number) for factor in factors) and any(map(_is_decimal, factors))


def _agree(gold: Expr, answer: Expr) -> bool:
    """Return whether a decimal is a rounding of the other number.

    Both have to agree to six places, and below 0.0001 in six digits: `0.333333` is an answer where 1/3 is
    expected, and `0.333` is not.
    """
    from sympy import Rational

    exact = [value if value.is_Rational else Rational(value.evalf(MAX_DIGITS)) for value in (gold, answer)]
    one, other = (Fraction(int(value.p), int(value.q)) for value in exact)
    if max(abs(one), abs(other)) < _SMALL:
        return abs(one - other) <= abs(one) * _CLOSE
    return round(one, _PLACES) == round(other, _PLACES)


if __name__ == "__main__":
    main()
