"""Letting clients in, all that wait at once: uvloop lets in one between two rounds of calls, so that the last of a thousand
agents that begin together would wait for as many rounds, which the calls of the others make long."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 1024
_PAUSE_S = 1.0
"""After the system has refused a connection, mostly because too many files are open."""


class Acceptor:
    """Accepts the connections of one listening socket, which stays its owner's. Belongs to the event loop that makes it."""

    def __init__(self, listener: socket.socket, connect: Callable[[], asyncio.Protocol]) -> None:
        """`connect` makes the protocol of a connection."""
        self._listener = listener
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()

    async def wait_closed(self) -> None:
        """Return once every connection that was accepted has its protocol."""
        await asyncio.gather(*self._connecting)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be accepted for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._listener)
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
                return
            task: asyncio.Task[object] = self._loop.create_task(self._serve(accepted))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connect, accepted)
        except OSError as error:  # It is gone already.
            logger.debug("a connection was lost at once: %s", error)
            accepted.close()
