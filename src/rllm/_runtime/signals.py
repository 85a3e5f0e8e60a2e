"""Hear of Ctrl-C once where it comes twice at a time."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TOGETHER_S = 0.3
"""Signals that come no later than this after another mean the same: `timeout` sends two, to its child and to all of its group,
as do terminals that close, and programs that pass on what their child has got already."""


@contextmanager
def on_ctrl_c(handle: Any) -> Iterator[None]:
    """While inside, this handler hears of Ctrl-C; of several that come together, of the first. Only the main thread has one."""
    if threading.current_thread() is not threading.main_thread() or not callable(handle):
        yield
        return
    heard_at = -math.inf

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at > TOGETHER_S:
            heard_at = time.monotonic()
            handle(number, frame)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
