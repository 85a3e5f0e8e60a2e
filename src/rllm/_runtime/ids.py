"""Random ids without a system call each: a rollout needs a dozen of them."""

from __future__ import annotations

import os
import random

_random = random.Random(os.urandom(32))


def new_id() -> str:
    """Return 128 random bits in hex: unique, but predictable to a reader of many of them, so not a secret."""
    return f"{_random.getrandbits(128):032x}"


if hasattr(os, "register_at_fork"):
    # A forked child must not repeat its parent's ids.
    os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))
