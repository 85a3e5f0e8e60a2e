"""Calls in a thread: one after the other, so that a slow server never holds up training; and one at regular intervals."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from rllm.errors import RLLMError

MAX_WAITING = 1000
"""Calls that may wait; a tracker that is further behind is given up."""
CLOSE_S = 30.0
"""How long the end of a run waits for them."""

_END = None


class Background:
    """A thread that makes calls in order. What goes wrong in it is raised at the next `do` or `close`."""

    def __init__(self, name: str, *, max_waiting: int = MAX_WAITING, close_s: float = CLOSE_S) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(max_waiting)
        self._close_s = close_s
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Have this called, after what was asked for before."""
        self._raise_error()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise RLLMError(f"it does not keep up: {self._calls.qsize()} calls wait") from None

    def close(self) -> None:
        """Wait until everything is done. Repeatable."""
        if self._thread.is_alive():
            self.do(lambda: None)
            with suppress(queue.Full):  # then it is not done in time either
                self._calls.put(_END, timeout=self._close_s)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                raise RLLMError(f"it was not done within {self._close_s:g} s; {self._calls.qsize()} calls are lost")
        self._raise_error()

    def _work(self) -> None:
        while self._error is None and (call := self._calls.get()) is not _END:
            try:
                call()
            except Exception as error:  # raised where somebody can act on it
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Heartbeat:
    """A thread that calls a function at regular intervals, until it is closed or the function raises."""

    def __init__(self, beat: Callable[[], object], *, every_s: float) -> None:
        self._beat = beat
        self._every_s = every_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rllm heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until no call is under way; there will be none after it. Repeatable."""
        self._is_closed.set()
        self._thread.join()

    def _work(self) -> None:
        with suppress(Exception):  # a line less is no reason to end a run
            while not self._is_closed.wait(self._every_s):
                self._beat()
