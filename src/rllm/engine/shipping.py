"""What is sent to other machines: functions and classes by their import path, those of a script by their code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImportPaths:
    """Where a program finds its modules, said so that a copy of its working directory on another machine has them, too."""

    inside: list[str]
    """Folders of the working directory, relative to it."""
    outside: list[str]
    """Others, which are looked for at the same place."""

    @classmethod
    def of(cls, working_dir: Path | None = None) -> ImportPaths:
        """Those of this process."""
        root = (working_dir or Path.cwd()).resolve()
        folders = [Path(path or ".").resolve() for path in sys.path]
        inside = [str(folder.relative_to(root)) for folder in folders if folder.is_relative_to(root)]
        return cls(inside=inside, outside=[str(folder) for folder in folders if not folder.is_relative_to(root)])

    def apply(self) -> None:
        """Add them to those of this process, whose current directory is the copy."""
        here = Path.cwd()
        inside = [str((here / folder).resolve()) for folder in self.inside]
        outside = [folder for folder in self.outside if Path(folder).exists()]
        sys.path[:0] = [folder for folder in inside if folder not in sys.path]
        sys.path.extend(folder for folder in outside if folder not in sys.path)


OF_CODE = (
    "put it into a module of its own (agent.py) and import it from there, or make its clients, locks and open files inside "
    "the function"
)
OF_DATA = "use plain data: texts, numbers, lists, mappings, dataclasses; no clients, locks or open files"


def packed(value: Any, what: str, remedy: str) -> bytes:
    """The value as bytes.

    Raises:
        ConfigError: if it cannot be sent, naming what of it.
    """
    try:
        return _dumps(value)
    except Exception as error:  # whatever the part's own pickling raises
        held = next(_unsendable(value), None)
        named = f": it uses {held}" if held else ""
        raise ConfigError(
            f"{what} cannot be sent to another machine{named} ({type(error).__name__}: {error}): {remedy}"
        ) from error


def unpacked(data: bytes) -> Any:
    """The value again."""
    return _cloudpickle().loads(data)


def _dumps(value: Any) -> bytes:
    data: bytes = _cloudpickle().dumps(value)
    return data


def _cloudpickle() -> Any:
    from ray import cloudpickle

    return cloudpickle


def _unsendable(value: Any) -> Iterator[str]:
    """Names that functions in the value use, and whose values cannot be sent."""
    for function in _functions_of(value):
        used = inspect.getclosurevars(function)
        for name, part in {**used.globals, **used.nonlocals}.items():
            try:
                _dumps(part)
            except Exception:  # as above
                yield f"{name!r} ({type(part).__name__})"


def _functions_of(value: Any) -> Iterator[Any]:
    """The value and what it holds, as far as that is a function, or a class with methods."""
    is_code = inspect.isfunction(value) or inspect.isclass(value)
    for part in [value] if is_code else list(getattr(value, "__dict__", {}).values()):
        held = vars(part).values() if inspect.isclass(part) else [part]
        yield from (item for item in held if inspect.isfunction(item))
