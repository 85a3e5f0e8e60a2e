"""Ports for servers whose address is needed before they listen, or that come back to it."""

import itertools
import os
import random
import socket

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NEVER_LENT = range(15_000 + WORKER % 8, 32_000, 8)
"""Ports that no other test process takes, nor the system gives to whoever takes any: its own begin above them."""

_ports = itertools.cycle(random.sample(NEVER_LENT, len(NEVER_LENT)))


def free_port() -> int:
    """A port that nobody has, nor is given for as long as nobody listens on it."""
    for port in _ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError
