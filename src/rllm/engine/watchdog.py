"""Name whoever blocks the event loop: no deadline can end an async agent that never lets go of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rllm._runtime.threads import stack_of
from rllm.engine.awake import GAP_S, awake

logger = logging.getLogger(__name__)


@contextmanager
def watched_loop(patience_s: float = 10.0) -> Iterator[None]:
    """While inside, log the running loop's stack whenever one step of it has taken longer than `patience_s` seconds, but for those
    during which the process was suspended."""
    loop = asyncio.get_running_loop()
    watched = threading.current_thread()
    ended = threading.Event()
    last_turn = awake()

    def beat() -> None:
        nonlocal last_turn
        last_turn = awake()
        if not ended.is_set():
            loop.call_later(patience_s / 4, beat)

    def watch() -> None:
        reported = 0.0
        while not ended.wait(min(patience_s, GAP_S) / 4):
            now, blocked_since = awake(), last_turn
            if now - blocked_since > patience_s and reported != blocked_since:
                reported = blocked_since
                logger.error(
                    "the event loop has been blocked for %.0f s, so all rollouts wait: an async agent makes a blocking call; "
                    "make it a sync function, or await asyncio.to_thread(...). It is at:\n%s",
                    now - blocked_since,
                    stack_of(watched),
                )

    beat()
    threading.Thread(target=watch, name="rllm loop watchdog", daemon=True).start()
    try:
        with awake.watched():
            yield
    finally:
        ended.set()
