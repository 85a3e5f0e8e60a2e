"""Reference-counted patches of other libraries' classes; one of them passes sessions on to new threads.

If someone else patches the same attribute later, their patch stays and ours remains underneath, so each replacement
must do nothing when no session is open.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any, TypeAlias, TypeVar

from rllm._runtime.process import no_fork_meanwhile

R = TypeVar("R")
Replacement: TypeAlias = tuple[type, str, Callable[[Any], Callable[..., object]]]
"""An attribute to replace: `owner.name` becomes `wrap(owner.name)`."""


class Patch:
    """Set of replacements that is in place while at least one `install` has no `uninstall` yet."""

    def __init__(self, replacements: Callable[[], Iterable[Replacement]]) -> None:
        self._replacements = replacements
        self._count = 0
        self._undo: list[tuple[type, str, object, object]] = []

    def install(self) -> None:
        with no_fork_meanwhile():
            self._count += 1
            if self._count > 1:
                return
            for owner, name, wrap in self._replacements():
                original = owner.__dict__[name]
                replacement = functools.wraps(original)(wrap(original))
                setattr(owner, name, replacement)
                self._undo.append((owner, name, original, replacement))

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


def _start_with_context(start: Callable[..., None]) -> Callable[..., None]:
    def start_with_context(self: threading.Thread) -> None:
        context, target = copy_context(), self.run

        def run() -> None:
            # Break the cycle from the thread to itself; after a failed first start there are two such functions.
            self.__dict__.pop("run", None)
            context.run(target)

        self.run = run  # type: ignore[method-assign]
        start(self)

    return start_with_context


def _submit_with_context(submit: Callable[..., Future[R]]) -> Callable[..., Future[R]]:
    def submit_with_context(
        self: ThreadPoolExecutor, fn: Callable[..., R], /, *args: object, **kwargs: object
    ) -> Future[R]:
        # The worker thread that this job may start outlives the job, so it must not inherit its context.
        return Context().run(submit, self, copy_context().run, fn, *args, **kwargs)

    return submit_with_context


def _give_with_context(give: Callable[..., object]) -> Callable[..., object]:
    """Wrap a method of `multiprocessing.pool.Pool` whose first argument is a function."""
    from multiprocessing.pool import ThreadPool

    def give_with_context(self: object, func: Callable[..., R], *args: object, **options: object) -> object:
        if not isinstance(self, ThreadPool):
            from rllm.sdk.propagation import bind  # which imports this module

            return give(self, bind(func), *args, **options)
        context = copy_context()

        def run(*items: object, **named: object) -> R:
            return context.copy().run(func, *items, **named)  # a copy, because several threads may run it at once

        return give(self, run, *args, **options)

    return give_with_context


def _replacements() -> Iterator[Replacement]:
    from multiprocessing.pool import Pool  # imported late: it takes as long to load as a third of this package

    yield threading.Thread, "start", _start_with_context
    yield ThreadPoolExecutor, "submit", _submit_with_context
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all its other methods use these
        yield Pool, name, _give_with_context


context_in_threads = Patch(_replacements)
"""Installed while any session is open.

Before 3.14, Python starts threads with an empty context, and executors run jobs in the context that started the worker,
so model calls made there would belong to no session, or to a session that has ended.
"""
