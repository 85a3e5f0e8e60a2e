"""Forks that users' code makes: each ends where that code does, since everything behind is its parent's and is done once; and
none is made in the midst of a program's start, or of a change to other people's classes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_lock = threading.RLock()


def _renew() -> None:
    """A child has a lock of its own, and releases none: uvloop, while it starts a program, may tell it twice that it is one."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _lock.acquire(), after_in_child=_renew, after_in_parent=lambda: _lock.release())


@contextmanager
def no_fork_meanwhile() -> Iterator[None]:
    """Other threads' forks wait, and whoever else comes here. A fork in the midst of `subprocess.Popen` has all pipes to the new
    program, which nobody hears the end of before that fork, too, has ended; one in the midst of a change has half of it."""
    with _lock:
        yield


@contextmanager
def forks_end_here() -> Iterator[None]:
    """What comes out in another process than it went in ends as a program does at its end, or at what it raised."""
    process = os.getpid()
    try:
        yield
    except GeneratorExit:  # garbage of the parent's
        raise
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise
    if os.getpid() != process:
        _end(None)


def _end(error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    with suppress(Exception):  # whatever becomes of what it says, it ends
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            code = error.code or 0
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
