"""Random ids, made without a system call each: a rollout makes a dozen of them."""

from __future__ import annotations

import os
import random

_random = random.Random(os.urandom(32))


def new_id() -> str:
    """128 random bits in hex: unique, but no secret, because who has seen many can tell the next ones."""
    return f"{_random.getrandbits(128):032x}"


def _begin_anew() -> None:
    _random.seed(os.urandom(32))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # a forked child must not make its parent's ids
