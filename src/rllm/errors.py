"""Exceptions of the project, and the context managers that attribute errors of users' code.

    RLLMError
    ├── ConfigError(ValueError)              a setting is wrong; raised before anything starts
    ├── MissingDependencyError(ImportError)  names the extra: pip install 'rllm[verl]'
    ├── PluginError                          a module named by the user raised when it was imported
    ├── RolloutError                         recorded on the episode; other rollouts continue
    │   ├── AgentError · EnvError · RewardError   user code raised; `boundary` attributes it
    │   ├── CaptureError                     a rollout without model calls, or without usable tokens
    │   ├── InferenceError(status_code) ─ PromptTooLongError
    │   └── RolloutTimeout(TimeoutError)
    ├── TokenMismatchError(ValueError)       ids, mask or logprobs disagree; always fatal
    ├── StoreError ─ SessionDeletedError
    ├── CheckpointError
    ├── WeightSyncError
    └── WorkerError                      a training worker failed, died or ran out of memory

Users' code raises plain Python errors; `with boundary(EnvError, "env.step")` converts them once, where that code is
called. Every message states what was wrong, the value, and the remedy. All errors can be pickled, because Ray sends
them between processes.
"""

from __future__ import annotations

import math
import os
import reprlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RLLMError(Exception):
    """Base class of all errors that this project raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls `cls(*args)`, which fails for constructors with keyword arguments. `__new__` sets `args`.
        return (_new, (type(self), self.args), self.__dict__)


def _new(kind: type[RLLMError], args: tuple[object, ...]) -> RLLMError:
    return kind.__new__(kind, *args)


class ConfigError(RLLMError, ValueError):
    """A setting, an argument or an input file is wrong. Raised before anything starts."""


class MissingDependencyError(RLLMError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingDependencyError:
        return cls(f"{purpose} needs the package {package!r}, which is not installed: pip install 'rllm[{extra}]'")


@contextmanager
def needed(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Raise `MissingDependencyError` if an import inside the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(package, extra, purpose) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which cannot be imported ({error}): "
            f"pip install 'rllm[{extra}]', which has versions that fit"
        ) from error


_TO_TRAIN = frozenset({"torch", "transformers", "peft", "safetensors", "jinja2", "numpy"})
"""Packages of the extra `train`."""


@contextmanager
def needed_to_train(purpose: str) -> Iterator[None]:
    """Raise `MissingDependencyError` if an import inside the block needs a missing package of the extra `train`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _TO_TRAIN:
            raise
        raise MissingDependencyError.of(error.name, "train", purpose) from error


class PluginError(RLLMError):
    """A module of the user raised when it was imported, or a function in it when the trainer called it."""


class RolloutError(RLLMError):
    """One rollout failed. The error is recorded on its episode; other rollouts continue."""


class AgentError(RolloutError):
    """The agent's own code raised."""


class EnvError(RolloutError):
    """The environment's code raised."""


class RewardError(RolloutError):
    """The reward function raised."""


USER_CODE_ERRORS = (AgentError, EnvError, RewardError, PluginError)
"""Errors in the user's own code, which a retry would only repeat."""


class CaptureError(RolloutError):
    """No model call of a rollout reached the gateway, or its calls have no usable tokens."""


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
        """Tokens of the prompt, if they were counted."""


class RolloutTimeout(RolloutError, TimeoutError):
    """A rollout did not finish by its deadline."""


class TokenMismatchError(RLLMError, ValueError):
    """Token ids, mask and log-probabilities disagree. Never caught: exact tokens are the promise of the project."""


class StoreError(RLLMError):
    """The trace store cannot be opened, read or written."""


class SessionDeletedError(StoreError):
    """Traces were added to a session that has been deleted."""


class CheckpointError(RLLMError):
    """A checkpoint cannot be written. Earlier ones are unchanged."""


class WeightSyncError(RLLMError):
    """A weight update did not reach the sampler."""


class WorkerError(RLLMError):
    """A training process failed, died, ran out of memory or does not respond."""


@contextmanager
def boundary(error: type[RolloutError], where: str) -> Iterator[None]:
    """Convert exceptions of users' code to `error("{where} raised ValueError: ... (at my_agent.py:12)")`.

    Errors of this project pass unchanged, and so do those that are not `Exception` (cancellation, Ctrl-C). A group, as
    raised by a `TaskGroup`, is replaced by one of its errors.
    """
    try:
        with ungrouped():
            yield
    except RLLMError:
        raise
    except Exception as cause:
        raise error(raised(where, cause)) from cause


def raised(where: str, cause: BaseException) -> str:
    """Return the message of an error in the user's code: `agent raised ValueError: bad move (at my_agent.py:12)`."""
    first, newline, rest = _message_of(cause).partition("\n")
    first = f": {first}" if first else ""
    return f"{where} raised {type(cause).__name__}{first}{place_of(cause)}{newline}{rest}"


@contextmanager
def ungrouped() -> Iterator[None]:
    """Replace a group of errors by the first fatal error of this project in it, or else by its first error."""
    try:
        yield
    except ExceptionGroup as group:
        errors: list[Exception] = []
        remaining: list[Exception] = [group]
        while remaining:
            error = remaining.pop(0)
            if isinstance(error, ExceptionGroup):
                remaining[:0] = error.exceptions
            else:
                errors.append(error)
        fatal = (error for error in errors if isinstance(error, RLLMError) and not isinstance(error, RolloutError))
        chosen = next(fatal, errors[0])
        raise chosen from chosen.__cause__


@contextmanager
def concerning(what: str) -> Iterator[None]:
    """Prefix configuration errors raised in the block with the option or argument that they concern: `"--val: ..."`."""
    try:
        yield
    except (ConfigError, MissingDependencyError) as error:
        raise type(error)(f"{what}: {error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    return _message_of(error).strip().partition("\n")[0] or type(error).__name__


def last_lines(text: str) -> str:
    """Return the end of a program's output for a message, or `no output`; `[...]` stands for omitted text."""
    text = text.strip()
    end = "\n".join(text.split("\n")[-8:])[-800:]
    return (end or "no output") if end == text else f"[...] {end}"


def shown(value: object) -> str:
    """Return a shortened form of a user's value, for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not format integers of thousands of digits
        return "<a number too long to write>"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 task` or `2 tasks`, for a message; `plural` is needed for nouns whose plural is irregular."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def all_of(number: int, noun: str, plural: str = "") -> str:
    """Return `all 2 tasks` or `the only task`, for a message."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun, plural)}"


_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = f"{Path(__file__).parent}{os.sep}"


def place_of(error: BaseException) -> str:
    """Return ` (at FILE:LINE)` for the innermost frame of the user's own code, or an empty string if there is none.

    Frames of the standard library and of this package do not count. Frames of installed packages count only if the
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


def traceback_of(error: BaseException | None) -> str:
    """Return the traceback of an error; for a `RolloutError` that this package raised, only its cause's."""
    if error is None:
        return ""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, RolloutError) and files and files[-1].startswith(_OURS):
        return traceback_of(error.__cause__)
    return "".join(traceback.format_exception(error))


NOISE = 1e-12
"""Absolute value below which a number is treated as a rounding error."""


def number(value: object, *, digits: int = 3, decimals: int | None = None) -> str:
    """Format a number in a few digits, as 0.531, 12.4 or 3.1e-07; rounding errors as 0, and `None` as empty text.

    Args:
        value: The number; other values are converted to text.
        digits: Significant digits.
        decimals: Digits after the point for numbers from 0.001 to 1000, so that the numbers of a column line up.
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


def _message_of(error: BaseException) -> str:
    """Return the message of an error, or its arguments if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return repr(error.args)
