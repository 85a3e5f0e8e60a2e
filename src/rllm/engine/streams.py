"""What a program prints and logs goes where it went before, whatever agents make of `sys.stdout` and `sys.stderr`.

A tool that runs code with `contextlib.redirect_stdout` changes them for all threads. Where two do so at a time, what is left in the
end is the buffer of one of them; and to write to a closed one is an error, which logging passes on.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_num_inside = 0
_before: tuple[Any, ...] = ()


@contextmanager
def streams_kept() -> Iterator[None]:
    """Afterwards, the streams are those of before; what is logged inside, and nobody else handles, goes to that stderr."""
    global _num_inside, _before
    with _lock:
        if _num_inside == 0:
            _before = sys.stdout, sys.stderr, logging.lastResort
            logging.lastResort = logging.StreamHandler(sys.stderr)
            logging.lastResort.setLevel(logging.WARNING)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                sys.stdout, sys.stderr, logging.lastResort = _before
