"""What an evaluation found, as its folder's report tells it; what is of another form is not shown."""

from __future__ import annotations

from pathlib import Path

from msgspec import DecodeError, Struct
from msgspec.json import decode

from rllm._runtime.untrusted import TooLargeError, read_bytes

_REPORT = "report.json"
_LOCK = ".lock"


class Accuracy(Struct, kw_only=True):
    """A share, with its 95 % interval."""

    value: float
    low: float
    high: float


class Evaluated(Struct, kw_only=True):
    """The first numbers of a report."""

    num_tasks: int
    num_rollouts: int
    num_failed: int
    accuracy: Accuracy | None = None
    mean_reward: float | None = None


def has_ended(folder: Path) -> bool:
    """Whether an evaluation in this folder has, since it was last begun: it opens its lock first, and writes its report last."""
    report, lock = folder / _REPORT, folder / _LOCK
    return report.exists() and not (lock.exists() and lock.stat().st_mtime_ns > report.stat().st_mtime_ns)


def evaluated(folder: Path) -> Evaluated | None:
    """What was found of an evaluation in this folder; `None` where nothing was yet, or it is of no evaluation."""
    try:
        return decode(read_bytes(folder / _REPORT), type=Evaluated)
    except (OSError, TooLargeError, DecodeError, UnicodeDecodeError, RecursionError):
        return None
