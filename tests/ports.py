"""Ports for servers whose address is needed before they listen, or that are restarted on it."""

import itertools
import os
import random
import socket

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NEVER_LENT = range(15_000 + WORKER % 8, 32_000, 8)
"""Ports that neither another test process nor the system takes: the range of ephemeral ports begins above them."""

_ports = itertools.cycle(random.sample(NEVER_LENT, len(NEVER_LENT)))


def free_port() -> int:
    """Return a port that is free, and is not assigned by the system until a program listens on it."""
    for port in _ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError
