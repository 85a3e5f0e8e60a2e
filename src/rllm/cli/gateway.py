"""`rllm gateway`: capture the calls of any agent in front of any OpenAI-compatible server."""

from __future__ import annotations


def gateway() -> None:
    """Serve the capturing gateway."""
    raise NotImplementedError
