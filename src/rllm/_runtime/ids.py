"""Random ids."""

from __future__ import annotations

import os


def new_id() -> str:
    """Return 128 random bits in hex."""
    return os.urandom(16).hex()
