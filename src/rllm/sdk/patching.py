"""Replace attributes of other people's classes for a while, counted, and put them back exactly.

Whoever patched the same attribute after us keeps their patch: ours then stays underneath, and every replacement of ours
must therefore do nothing when there is nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rllm._runtime.forks import no_fork_meanwhile

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original function and returns its replacement."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """One attribute to replace: `owner.name` becomes `wrap(owner.name)`."""

    owner: type
    name: str
    wrap: Wrapper


class Patch:
    """A set of replacements that is in place while at least one `install` has no `uninstall` yet."""

    def __init__(self, replacements: Callable[[], Iterable[Replacement]]) -> None:
        self._replacements = replacements
        self._count = 0
        self._undo: list[tuple[type, str, Any, Any]] = []

    def install(self) -> None:
        with no_fork_meanwhile():
            self._count += 1
            if self._count == 1:
                self._undo = [_replace(item) for item in self._replacements()]

    def uninstall(self) -> None:
        with no_fork_meanwhile():
            self._count -= 1
            if self._count == 0:
                for owner, name, original, replacement in self._undo:
                    if owner.__dict__.get(name) is replacement:
                        setattr(owner, name, original)
                self._undo = []

    def __enter__(self) -> Patch:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def _replace(item: Replacement) -> tuple[type, str, Any, Any]:
    original = item.owner.__dict__[item.name]
    replacement = functools.wraps(original)(item.wrap(original))
    setattr(item.owner, item.name, replacement)
    return item.owner, item.name, original, replacement
