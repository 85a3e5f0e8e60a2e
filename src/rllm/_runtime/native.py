"""The compiled reader of tokens, where it is installed: `make native`, or `pip install ./native`.

Without it everything works alike, and the gateway takes more CPU. What it reads are arrays, `array("I")` of ids
and `array("d")` of log-probabilities, in the place of lists.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

INTERFACE = 1
"""The version of its functions that is known here."""

compiled: ModuleType | None = None
"""`None` where there is none, or one of another version."""
with suppress(ImportError):
    import rllm_native  # type: ignore[import-not-found, unused-ignore]

    if rllm_native.INTERFACE == INTERFACE:
        compiled = rllm_native
