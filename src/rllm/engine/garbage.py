"""Python's search for cycles, held less often during a training, and while many rollouts are under way.

Each rollout makes thousands of objects that live as long as it does, clients above all, and by Python's own measure every 700 new
ones are a reason to search: a thousand rollouts at a time then spend a sixth of their CPU time on finding nothing, and a training
step of a small policy 3 %.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from rllm.engine.overlapping import overlapping

THRESHOLDS = (10_000, 20, 20)
"""As `gc.set_threshold` takes them."""
_PYTHONS_OWN = (700, 2_000)
"""The first of the thresholds that Python has by itself, of its versions up to 3.12 and from 3.13."""


@overlapping
@contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside, cycles are searched for rarely, in all threads; a program that has chosen thresholds itself keeps them."""
    before = gc.get_threshold()
    if before[0] in _PYTHONS_OWN:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
