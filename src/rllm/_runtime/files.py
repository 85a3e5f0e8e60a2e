"""Files that a crash or a power loss leaves either old or new, and locks between processes."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from rllm.errors import ConfigError

MAX_LINE_BYTES = 256 * 1024 * 1024


def cache_folder() -> Path:
    """Return the user's cache folder: `$RLLM_CACHE`, `$XDG_CACHE_HOME/rllm` or `~/.cache/rllm`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RLLM_CACHE") or Path(base) / "rllm").expanduser()


def new_folder(parent: Path) -> Path:
    """Return the path of a folder that does not exist yet, named after the current time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    numbered = (parent / f"{name}-{number}" for number in itertools.count(2))
    return next(path for path in itertools.chain([parent / name], numbered) if not path.exists())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a path at which to create a folder, which is renamed to `folder` at the end.

    If another process was faster, its folder stays.
    """
    with suppress(FileExistsError):  # the parent is a file: the next line has a better error
        folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        yield new
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir() or not any(folder.iterdir()):
                raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; at the end, the new file replaces `path` atomically and durably.

    Raises:
        OSError: if `path` is a device or a pipe, which the file would replace.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
    place = Path(os.path.realpath(path))  # a link stays; its target is replaced
    new = place.with_name(f"{place.name}.new")
    try:
        yield new
        flush(new)
        new.replace(place)
        flush(place.parent)
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically and durably."""
    with new_file(path) as new:
        new.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Make a file, or the entries of a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Make the content of an open file survive a power loss."""
    if sys.platform == "darwin":  # where `fsync` leaves data in the cache of the disk
        import fcntl

        with suppress(OSError):  # file systems that only support `fsync`
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, without a torn last one; nothing if the file does not exist.

    Raises:
        ConfigError: if a line is longer than any that this package writes.
    """
    if path.exists():
        with path.open("rb") as file:
            for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
                if line.endswith(b"\n"):
                    yield line
                elif len(line) == MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes: it was not written by rllm"
                    )


def from_here(path: Path) -> Path:
    """Return the path relative to the current folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def is_named_by(variable: str, path: Path) -> bool:
    """Return whether an environment variable like `PATH` lists this folder or one above it."""
    places = (Path(place).expanduser().resolve() for place in os.environ.get(variable, "").split(os.pathsep) if place)
    return any(path.resolve().is_relative_to(place) for place in places)


def whole_lines(path: Path) -> int:
    """Return the length of a file in bytes, without a torn last line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def lock(file: IO[Any], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return `False` if another process holds it. Does nothing on Windows."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
