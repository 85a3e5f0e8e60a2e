"""Files that an agent changed: their names, sizes and a bounded diff."""

from __future__ import annotations

import difflib
import filecmp
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rllm._runtime.untrusted import shown
from rllm.tasks.task import MAX_TEXT, FileChange

_MAX_BYTES, _MAX_LINES = 64 << 10, 1000
"""Larger files are listed without a diff, whose time may grow with the square of their lines."""


def changes(before: Path, after: Path) -> tuple[FileChange, ...]:
    """Return the files that differ between two folders, by path. The files of a `.git` folder count as one."""
    found: dict[str, FileChange] = {}
    old, new = set(_files_in(before)), set(_files_in(after))
    for path in sorted(old | new):
        if path in old and path in new and _is_equal(before / path, after / path):
            continue
        repository = _repository(path)
        if repository is not None:
            size = sum(_size(after / name) for name in new if _repository(name) == repository)
            found.setdefault(repository, FileChange(path=_text(repository), kind="changed", num_bytes=size))
        elif path not in new:
            found[path] = FileChange(path=_text(path), kind="removed", num_bytes=0)
        elif path in old:
            found[path] = FileChange(path=_text(path), kind="changed", num_bytes=_size(after / path))
        else:
            found[path] = FileChange(path=_text(path), kind="added", num_bytes=_size(after / path))
    return tuple(found.values())


def diff(before: Path, after: Path) -> str:
    """Return a unified diff of the text files that differ, cut at `MAX_TEXT` characters."""
    text = ""
    for line in _diff_lines(before, after):
        if len(text) + len(line) > MAX_TEXT - 7:
            return f"{text}[...]"
        text += f"{line}\n"
    return text


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the relative paths of the files and links in a folder."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        yield from (Path(place, name).relative_to(folder).as_posix() for name in (*files, *links))


def _is_equal(old: Path, new: Path) -> bool:
    if old.is_symlink() or new.is_symlink():
        return old.is_symlink() and new.is_symlink() and old.readlink() == new.readlink()
    return filecmp.cmp(old, new, shallow=False)


def _size(path: Path) -> int:
    return path.lstat().st_size


def _text(path: str) -> str:
    """Return a path as valid text in one line, whatever bytes the agent put into it."""
    return shown(path.encode(errors="surrogateescape").decode(errors="replace").replace("\n", "\N{SYMBOL FOR NEWLINE}"))


def _repository(path: str) -> str | None:
    """Return the `.git` folder that a file is in; `None` if it is in none."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[: parts.index(".git") + 1]) if ".git" in parts[:-1] else None


def _diff_lines(before: Path, after: Path) -> Iterator[str]:
    for path in sorted({*_files_in(before), *_files_in(after)}):
        if _repository(path) is None:
            old, new = _lines(before / path), _lines(after / path)
            if old is not None and new is not None and old != new:
                yield from difflib.unified_diff(old, new, f"a/{_text(path)}", f"b/{_text(path)}", lineterm="", n=2)


def _lines(path: Path) -> list[str] | None:
    """Return the lines of a short text file, none of a missing one, and `None` for anything else."""
    if path.is_symlink():
        return [f"-> {_text(str(path.readlink()))}"]
    if not path.exists():
        return []
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    content = path.read_bytes()
    text = content.decode("utf-8", errors="replace").removesuffix("\n")
    lines = text.split("\n") if content else []
    return None if b"\0" in content or len(lines) > _MAX_LINES else lines
