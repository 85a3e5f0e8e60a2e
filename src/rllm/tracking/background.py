"""Calls made in a thread: in order, so that a slow server never delays training, or at regular intervals."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from rllm.errors import RLLMError

MAX_WAITING = 1000
"""Calls that may wait; a tracker that is further behind is dropped."""
CLOSE_S = 30.0
"""Longest wait for them at the end of a run."""

_END = None


class Background:
    """Thread that makes calls in order. An error in it is raised at the next `do` or `close`."""

    def __init__(self, name: str, *, max_waiting: int = MAX_WAITING, close_s: float = CLOSE_S) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(max_waiting)
        self._close_s = close_s
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Queue a call."""
        self._raise_error()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise RLLMError(f"the tracker does not keep up: {self._calls.qsize()} calls are waiting") from None

    def close(self) -> None:
        """Wait until all calls are made. Repeatable."""
        if self._thread.is_alive():
            self.do(lambda: None)
            with suppress(queue.Full):  # the join below then times out, too
                self._calls.put(_END, timeout=self._close_s)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                raise RLLMError(
                    f"the tracker did not finish within {self._close_s:g} s; {self._calls.qsize()} calls are lost"
                )
        self._raise_error()

    def _work(self) -> None:
        while self._error is None and (call := self._calls.get()) is not _END:
            try:
                call()
            except Exception as error:  # raised by the next call, in the caller's thread
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Heartbeat:
    """Thread that calls a function at regular intervals, until it is closed or the function raises."""

    def __init__(self, beat: Callable[[], object], *, every_s: float) -> None:
        self._beat = beat
        self._every_s = every_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rllm heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a call that is under way; none follows. Repeatable."""
        self._is_closed.set()
        self._thread.join()

    def _work(self) -> None:
        with suppress(Exception):  # a missing line is not a reason to end a run
            while not self._is_closed.wait(self._every_s):
                self._beat()
