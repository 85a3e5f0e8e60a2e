"""What a program prints and logs goes where it went before, whatever agents make of `sys.stdout` and `sys.stderr`.

A tool that runs code with `contextlib.redirect_stdout` changes them for all threads. Where two do so at a time, what is left in the
end is the buffer of one of them; and to write to a closed one is an error, which logging passes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rllm.engine.overlapping import overlapping


@overlapping
@contextmanager
def streams_kept() -> Iterator[None]:
    """Afterwards, the streams are those of before; what is logged inside, and nobody else handles, goes to that stderr."""
    before = sys.stdout, sys.stderr, logging.lastResort
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setLevel(logging.WARNING)
    try:
        yield
    finally:
        sys.stdout, sys.stderr, logging.lastResort = before
