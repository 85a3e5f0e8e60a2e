"""Every exception of the project, and the one place where a user's exception gets its name.

    RLLMError
    ├── ConfigError(ValueError)              a setting is wrong; raised before anything starts
    ├── MissingDependencyError(ImportError)  names the extra: pip install 'rllm[verl]'
    ├── PluginError                          a module that the user named raised when it was imported
    ├── RolloutError                         recorded on the episode, never stops its siblings
    │   ├── AgentError · EnvError · RewardError   user code raised; `boundary` attributes it
    │   ├── CaptureError                     a rollout that called no model, or whose calls hold no usable tokens
    │   ├── InferenceError(status_code) ─ PromptTooLongError
    │   └── RolloutTimeout(TimeoutError)
    ├── TokenMismatchError(ValueError)       ids, mask, logprobs disagree; fatal: this is the promise
    ├── StoreError ─ SessionDeletedError
    ├── CheckpointError
    ├── WeightSyncError
    └── WorkerError                      a training worker failed, died or ran out of memory

Users raise plain Python errors; `with boundary(EnvError, "env.step")` types them once, at the border. Every message says
what was wrong, the value seen, and the remedy. All of them survive pickling, because Ray sends them between processes.
"""

from __future__ import annotations

import math
import os
import reprlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllm._runtime.forks import forks_end_here


class RLLMError(Exception):
    """The root of every error that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls `cls(*args)`, which fails for constructors with keyword arguments.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[RLLMError], args: tuple[Any, ...], state: dict[str, Any]) -> RLLMError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(RLLMError, ValueError):
    """A setting, an argument or an input file is wrong. Raised before anything starts."""


class MissingDependencyError(RLLMError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingDependencyError:
        return cls(f"{purpose} needs the package {package!r}, which is not installed: pip install 'rllm[{extra}]'")


_TO_TRAIN = frozenset({"torch", "transformers", "peft", "safetensors", "jinja2", "numpy"})
"""What the extra `train` installs."""


@contextmanager
def needed_to_train(purpose: str) -> Iterator[None]:
    """Name the extra where an import inside finds a package of it missing: most of what trains imports them at its head."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _TO_TRAIN:
            raise
        raise MissingDependencyError.of(error.name, "train", purpose) from error


class PluginError(RLLMError):
    """A module of the user's raised when it was imported; the message has the traceback through the user's own lines."""


class RolloutError(RLLMError):
    """One rollout failed. Recorded on its episode; its siblings go on."""


class AgentError(RolloutError):
    """The agent's own code raised."""


class EnvError(RolloutError):
    """The environment's code raised."""


class RewardError(RolloutError):
    """The reward function raised."""


USER_CODE_ERRORS = (AgentError, EnvError, RewardError, PluginError)
"""Errors in the user's own code, which the same code raises again."""


class CaptureError(RolloutError):
    """A rollout made no model call that reached the gateway, or its calls hold no usable tokens."""


class InferenceError(RolloutError):
    """The inference server refused or failed a call."""

    def __init__(self, message: str, *, status_code: int = 502) -> None:
        super().__init__(message)
        self.status_code = status_code


class PromptTooLongError(InferenceError):
    """The prompt, or the prompt and `max_tokens` together, exceed the model's context length."""

    def __init__(self, message: str, *, status_code: int = 400, num_tokens: int | None = None) -> None:
        super().__init__(message, status_code=status_code)
        self.num_tokens = num_tokens
        """Of the prompt, where they were counted."""


class RolloutTimeout(RolloutError, TimeoutError):
    """A rollout did not finish by its deadline."""


class TokenMismatchError(RLLMError, ValueError):
    """Token ids, mask and log-probabilities disagree. Never recovered from: this is the promise of the project."""


class StoreError(RLLMError):
    """The trace store cannot be opened, read or written."""


class SessionDeletedError(StoreError):
    """What was to be added belongs to a session that was deleted meanwhile."""


class CheckpointError(RLLMError):
    """A checkpoint cannot be written; those that were are untouched."""


class WeightSyncError(RLLMError):
    """A weight update did not reach the sampler."""


class WorkerError(RLLMError):
    """A process that trains failed, died, ran out of memory or does not answer."""


@contextmanager
def boundary(error: type[RolloutError], where: str) -> Iterator[None]:
    """Raise `error("{where} raised ValueError: ... (at my_agent.py:12)")` from an exception of the user's code inside.

    Our own errors pass unchanged, and so do those that are not `Exception` (cancellation, Ctrl-C). A group, as a
    `TaskGroup` raises it, is replaced by one of its errors. A fork ends here.
    """
    try:
        with forks_end_here(), ungrouped():
            yield
    except RLLMError:
        raise
    except Exception as cause:
        raise error(raised(where, cause)) from cause


def raised(where: str, cause: BaseException) -> str:
    """Return the message of an error in the user's code: `agent raised ValueError: bad move (at my_agent.py:12)`."""
    first, newline, rest = _said_by(cause).partition("\n")
    first = f": {first}" if first else ""
    return f"{where} raised {type(cause).__name__}{first}{place_of(cause)}{newline}{rest}"


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise, in place of a group of errors, the first of them, or the first of ours that is no `RolloutError`."""
    try:
        yield
    except ExceptionGroup as group:
        errors = list(_errors_in(group))
        fatal = (error for error in errors if isinstance(error, RLLMError) and not isinstance(error, RolloutError))
        chosen = next(fatal, errors[0])
        raise chosen from chosen.__cause__


def _errors_in(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _errors_in(inner)
    else:
        yield error


@contextmanager
def concerning(what: str) -> Iterator[None]:
    """Begin what is said of a mistake inside with the option or argument that it is in: `"--val: ..."`."""
    try:
        yield
    except (ConfigError, MissingDependencyError) as error:
        raise type(error)(f"{what}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing; for a message that has more to say itself."""
    return _said_by(error).strip().partition("\n")[0] or type(error).__name__


def shown(value: object) -> str:
    """A value that users gave, shortened, for a message about it."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "<a number too long to write>"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 task`, `2 tasks`, for a message; `plural` is that of a noun which takes no mere s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def all_of(number: int, noun: str, plural: str = "") -> str:
    """`all 2 tasks`, or `the only task`, likewise."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun, plural)}"


_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = f"{Path(__file__).parent}{os.sep}"


def place_of(error: BaseException) -> str:
    """Return ` (at FILE:LINE)` for the innermost frame of the user's own code, or an empty string if there is none.

    Frames of the standard library and of this package do not count. Those of installed packages count only if the
    error passed through nothing else: the agent may be installed, too.
    """
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_OURS, "<"))
    ]
    installed = [place for place in frames if any(part in place[0] for part in _INSTALLED)]
    own = [place for place in frames if place not in installed and not place[0].startswith(_LIBRARY)]
    if not (own or installed):
        return ""
    file, line = own[-1] if own else installed[0]
    return f" (at {file.removeprefix(f'{Path.cwd()}{os.sep}')}:{line})"


NOISE = 1e-12
"""Size below which a value is rounding noise of a sum of numbers of ordinary size."""


def number(value: object, *, digits: int = 3, decimals: int | None = None) -> str:
    """Format a number in a few digits, as 0.531, 12.4 or 3.1e-07; rounding noise as 0, and `None` as nothing.

    Args:
        value: anything that is not a number is returned as its text.
        digits: significant digits.
        decimals: digits behind the point of numbers from 0.001 to 1000, so that those of a column or a log line up.
    """
    if value is None:
        return ""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size < NOISE:
        return "0" if decimals is None else f"{0.0:.{decimals}f}"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.{max(digits - 1, 1)}g}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}" if decimals is None else f"{value:.{decimals}f}"


def signed(value: float | None, *, decimals: int | None = None) -> str:
    """Format a number with its sign."""
    return f"{'+' if value is not None and value >= NOISE else ''}{number(value, decimals=decimals)}"


def _said_by(error: BaseException) -> str:
    """Its message; of a user's exception whose `__str__` raises in turn, the arguments."""
    try:
        return str(error)
    except Exception:
        return repr(error.args)
