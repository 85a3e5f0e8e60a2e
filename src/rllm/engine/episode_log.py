"""Episodes kept as lines of a file, so that what a process had done is still there when it dies.

A line is written with one system call and counts once it ends with a newline: what a crash tore off is never read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any, Self

import orjson

from rllm._runtime.files import lines_of, whole_lines
from rllm._runtime.untrusted import MAX_UNPACKED_BYTES, parse_json
from rllm.errors import StoreError
from rllm.types import Episode, is_scored

EPISODES = "episodes.jsonl"
"""The log of an evaluation, in its folder."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_TOKEN_FIELDS = ("prompt_ids", "response_ids", "logprobs")
_MAX_DEPTH = 64
"""What is nested deeper than this is cut off."""

_short = reprlib.Repr()
_short.maxother = _short.maxstring = _short.maxlong = 200


class EpisodeLog:
    """An append-only JSONL file of episodes; `EpisodeLog.read` gives them back.

    What agents leave in tasks, observations and infos need not be JSON: it becomes what is closest to it (an array a list, a
    path a string, NaN null), and what nothing is close to becomes `{"unserialisable": type name, "repr": ...}`.
    """

    def __init__(self, path: str | Path, *, tokens: bool = True) -> None:
        """Open for appending; whatever a crash left of a last line is cut off.

        Args:
            path: made with its folder if it is not there.
            tokens: False leaves token ids and log-probabilities out, because the trace store has them.

        Raises:
            StoreError: if the file cannot be written.
        """
        self.path = Path(path)
        self._tokens = tokens
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            self._file.truncate(whole_lines(self.path))
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def append(self, episode: Episode) -> None:
        """Add one line; it is with the operating system on return.

        Raises:
            StoreError: if it cannot be written, as on a full disk.
        """
        line = memoryview(self._line(episode))
        try:
            while line:  # the system takes less than all only where it then reports an error
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def close(self) -> None:
        """Close the file. Repeatable."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read(path: str | Path) -> Iterator[Episode]:
        """The episodes of a file, in the order of writing; none if there is no file.

        Raises:
            StoreError: naming the line that is not an episode.
        """
        for number, line in enumerate(lines_of(Path(path)), start=1):
            try:
                yield Episode.from_dict(parse_json(line, limit=MAX_UNPACKED_BYTES))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{path}, line {number} is not an episode ({error}): delete the line, or the file"
                ) from error

    def _line(self, episode: Episode) -> bytes:
        data = episode.to_dict()
        if not self._tokens:
            for step in (step for trajectory in data["trajectories"] for step in trajectory["steps"]):
                for name in _TOKEN_FIELDS:
                    del step[name]
        return to_json(data) + b"\n"

    def _cannot_be_written(self, error: OSError) -> StoreError:
        return StoreError(f"episodes cannot be written to {str(self.path)!r}: {error.strerror or error}")


def to_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Any value as JSON on one line; never raises. Floats that are not finite become null."""
    options = _OPTIONS | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    try:
        return orjson.dumps(value, default=_closest, option=options)
    except TypeError:  # orjson gives up on the whole, so the culprits are looked for one by one
        return orjson.dumps(_plain(value), option=options)


def _plain(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """The value with everything that orjson refuses replaced: text that is not Unicode, huge integers, odd keys, cycles.

    `inside` has the ids of the containers around it.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if id(value) in inside or len(inside) == _MAX_DEPTH:
        return _opaque(value)
    around = (*inside, id(value))
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, around) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, around) for item in value]
    try:
        orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        closest = _closest(value)
        return closest if _is_opaque(closest) else _plain(closest, around)
    return value


def _key(key: Any) -> str:
    text = key if isinstance(key, str) else _short.repr(key)
    return text.encode(errors="replace").decode()


def _closest(value: Any) -> Any:
    """What is closest to a value that orjson does not know, made of values that it may know."""
    try:
        if isinstance(value, float):
            return float(value) if is_scored(value) else None
        if isinstance(value, PurePath | Decimal):
            return str(value)
        if isinstance(value, date):  # pandas' times, which orjson does not take for the datetime that they are
            return value.isoformat()
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, tuple | AbstractSet):
            return list(value)
        for method in ("tolist", "model_dump", "to_dict"):  # arrays and tensors; pydantic's models; our own types
            if callable(convert := getattr(value, method, None)):
                return convert()
    except Exception:  # the conversion is the user's code
        return _opaque(value)
    return _opaque(value)


def _opaque(value: Any) -> dict[str, str]:
    try:
        text = _short.repr(value)
    except ValueError:  # Python writes no decimal number of thousands of digits
        text = "an integer of too many digits"
    return {"unserialisable": type(value).__qualname__, "repr": _plain(text)}


def _is_opaque(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"unserialisable", "repr"}
