"""A change to the whole program that lasts while anybody needs it: the first who comes makes it, the last who goes undoes it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeAlias

Change: TypeAlias = Callable[[], AbstractContextManager[None]]


def overlapping(change: Change) -> Change:
    """The same context manager for several at a time, in any threads."""
    lock, made = threading.Lock(), ExitStack()
    num_inside = 0

    @functools.wraps(change)
    @contextmanager
    def shared() -> Iterator[None]:
        nonlocal num_inside
        with lock:
            if num_inside == 0:
                made.enter_context(change())
            num_inside += 1
        try:
            yield
        finally:
            with lock:
                num_inside -= 1
                if num_inside == 0:
                    made.close()

    return shared
