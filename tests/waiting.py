"""Waiting for another thread or process."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(read: Callable[[], T], timeout_s: float = 60.0) -> T:
    """Return the result of `read`, once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := read()):
        assert time.monotonic() < deadline, f"the condition was not met within {timeout_s:g} s"
        time.sleep(0.01)
    return value
