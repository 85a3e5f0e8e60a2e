r"""The process that compares mathematical answers: a JSON line in, a JSON line out, and death at the deadline.

SymPy can take forever over nine characters (`9^{9^{9^9}}`), in C code that no exception interrupts and no thread can leave.
So the alarm keeps its default action here, which is to kill the process; whoever asked sees the end of the stream. It is run
as a program by `rllm.rewards.equivalence`, and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from functools import partial
from pathlib import Path
from typing import IO, Any

START_DEADLINE_S = 30.0
MAX_SLOWDOWN = 10
"""After this many times the deadline, by the clock on the wall, the process dies in any case."""
MEMORY_BYTES = 4 << 30
LARGE_BYTES = 512 << 20
"""A process that has grown so large, through SymPy's caches, is replaced."""

_UNIT = r"\\(?:text|mbox)\{[^{}]*\}(?:\^\{?-?\d\}?|\{\^\d\})?"
_UNITS = re.compile(rf"{_UNIT}(?:(?:\s|/|\\cdot|\\[, ])*{_UNIT})*$")


def main() -> None:
    """Answer requests until the input ends."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, whose end is the end of our input
    _set_alarm(START_DEADLINE_S)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # parsers print to stdout
    logging.disable()
    are_equal = _comparison()
    _set_alarm(0)
    _say(answers, ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        _set_alarm(request["deadline_s"])
        equal = are_equal(request["gold"], request["answer"])
        _set_alarm(0)
        _say(answers, equal=equal, last=_resident_bytes() > LARGE_BYTES)


def _set_alarm(cpu_s: float) -> None:
    """Die after so many CPU seconds, so that no verdict depends on what else the machine does; 0 calls it off."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, MAX_SLOWDOWN * cpu_s)


def _comparison() -> Any:
    import math_verify.parser
    from latex2sympy2_extended import math_normalization
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import LatexExtractionConfig, parse, verify

    # By default R and r are one symbol, and `R - r` is 0.
    math_verify.parser.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))
    # By default `3 \text{ h } 4 \text{ min}` is cut behind the 3, as if all from the first text on were one unit.
    math_normalization.unit_superscript_regex = _UNITS
    latex = (LatexExtractionConfig(boxed_match_priority=0),)  # the other kind evaluates text as Python

    def are_equal(gold: str, answer: str) -> bool:
        parsed = [parse(rf"\boxed{{{text}}}", latex, parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(*parsed, timeout_seconds=None))

    return are_equal


def _resident_bytes() -> int:
    """Of this program alone: the peak that Linux tells through `getrusage` counts the trainer that started it."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _say(answers: IO[str], **values: bool) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
