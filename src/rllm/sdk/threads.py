"""Let new threads and the jobs of executors and pools see the session of whoever started them.

Python (before 3.14) gives a new thread an empty context, and an executor's worker the context of nobody in particular, so
a model call made there would belong to no session; or, in a pool that outlives the rollout which began it, to that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

from rllm.sdk.patching import Patch, Replacement


def _start_with_context(start: Callable[..., None]) -> Callable[..., None]:
    def start_with_context(self: threading.Thread) -> None:
        context, target = copy_context(), self.run

        def run() -> None:
            # Breaks the cycle from the thread to itself; there are two such functions where a first start found no room.
            self.__dict__.pop("run", None)
            context.run(target)

        self.run = run  # type: ignore[method-assign]
        start(self)

    return start_with_context


def _submit_with_context(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def submit_with_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        # The worker thread that this job may start outlives the job, so that thread itself must inherit nothing.
        return Context().run(submit, self, copy_context().run, fn, *args, **kwargs)

    return submit_with_context


def _give_with_context(give: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of `multiprocessing.pool.Pool` that takes a function first."""
    from multiprocessing.pool import ThreadPool

    def give_with_context(self: Any, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not isinstance(self, ThreadPool):
            from rllm.sdk.processes import bind  # which imports this module

            return give(self, bind(func), *args, **options)
        context = copy_context()

        def run(*items: Any, **named: Any) -> Any:
            return context.copy().run(func, *items, **named)  # a copy, because several threads may be at it at once

        return give(self, run, *args, **options)

    return give_with_context


def _replacements() -> Iterator[Replacement]:
    from multiprocessing.pool import Pool  # when a session begins: it takes as long to load as a third of this package

    yield Replacement(threading.Thread, "start", _start_with_context)
    yield Replacement(ThreadPoolExecutor, "submit", _submit_with_context)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # on which all its other methods stand
        yield Replacement(Pool, name, _give_with_context)


context_in_threads = Patch(_replacements)
"""In place while any session is open."""
