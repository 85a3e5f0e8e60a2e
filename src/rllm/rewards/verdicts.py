"""Verdicts of a judge: parsing of its answers, and a cache on disk."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rllm._runtime.files import lines_of
from rllm._runtime.untrusted import json_within, parse_json
from rllm.errors import RewardError
from rllm.rewards.reward_types import after_thinking
from rllm.types import JSONObject

VERDICTS = "verdicts.jsonl"
"""Name of the file in the folder of a run or an evaluation."""
_MAX_ENUM = 101


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's scores from 0 to 1 by name, its reasons, and the tokens that they took."""

    scores: Mapping[str, float]
    reasoning: str
    tokens_in: int
    tokens_out: int
    cached: bool = False
    """True if it was read from the cache, so that no tokens were used for it now."""


class VerdictError(RewardError):
    """Raised if the judge fails, or if its answer cannot be read."""

    def __init__(self, message: str, tokens_in: int = 0, tokens_out: int = 0) -> None:
        super().__init__(message)
        self.tokens_in, self.tokens_out = tokens_in, tokens_out


def scores_schema(names: Sequence[str], scale: tuple[int, int]) -> JSONObject:
    """Return the JSON Schema of a verdict: reasons, and a whole number on the scale for each name."""
    worst, best = scale
    few = best - worst < _MAX_ENUM
    score = {"type": "integer", **({"enum": list(range(worst, best + 1))} if few else {})}
    return {
        "type": "object",
        "properties": {
            "reasoning": {"type": "string"},
            "scores": {
                "type": "object",
                "properties": dict.fromkeys(names, score),
                "required": list(names),
                "additionalProperties": False,
            },
        },
        "required": ["reasoning", "scores"],
        "additionalProperties": False,
    }


def read_scores(text: str, names: Sequence[str], scale: tuple[int, int]) -> tuple[dict[str, float], str]:
    """Return the scores, 0 for the worst and 1 for the best, and the reasons of a verdict.

    The last JSON object of the text that has scores counts, so that a model may reason first.

    Raises:
        ValueError: if there is none, or a score is missing or not a number on the scale.
    """
    objects = json_within(after_thinking(text), "{")
    found = [item for item in objects if isinstance(item.get("scores", item), Mapping)]
    if not found:
        raise ValueError("there is no JSON object with scores")
    scores = found[-1].get("scores", found[-1])
    worst, best = scale
    for name in names:
        score = scores.get(name)
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"the score of {name!r} is {score!r:.50}, not a number")
        if not worst <= score <= best:
            raise ValueError(f"the score of {name!r} is {score!r}, not from {worst} to {best}")
    return {name: (scores[name] - worst) / (best - worst) for name in names}, str(found[-1].get("reasoning", ""))


class VerdictCache:
    """Verdicts by the content that was judged, in a file if a folder is given. Threads and processes may share it."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / VERDICTS
        self._known: dict[str, Verdict] | None = None
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}

    def get_or_make(self, key: str, make: Callable[[], Verdict]) -> Verdict:
        """Return the verdict of this key; threads that need the same new one wait for a single call."""
        with self._lock:
            known = self._known = self._read() if self._known is None else self._known
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key in known:
                return replace(known[key], cached=True)
            known[key] = verdict = make()
            self._append(key, verdict)
        return verdict

    def _read(self) -> dict[str, Verdict]:
        known = {}
        for line in lines_of(self._path) if self._path else ():
            try:
                row = parse_json(line)
                key = row.pop("key")
                known[key] = Verdict(**row)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # of another version; the judge is called again
        return known

    def _append(self, key: str, verdict: Verdict) -> None:
        if self._path is None:
            return
        line = json.dumps({"key": key, **asdict(verdict)}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())  # one call, so that lines of several processes do not mix
        finally:
            os.close(descriptor)
