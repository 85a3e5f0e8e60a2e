"""Transfer of files into and out of sandboxes as tar archives; archives from a sandbox are not trusted."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import IO

from rllm.sandbox.base import SandboxError

_MAX_READ = 1 << 20
"""Maximum bytes of one read; `shutil.copyfileobj` reads less at a time."""
_MAX_DEPTH = 200
"""Maximum depth of folders. Python packs and removes folders by recursion, which ends at about 1,000."""


def file_of(content: str | bytes) -> IO[bytes]:
    """Return an open file without a name, to be read from its beginning; programs of other users may open it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.fchmod(file.fileno(), 0o666)  # code may open /dev/stdin by name, and has another user id
    file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
    file.seek(0)
    return file


def pack(source: Path, archive: IO[bytes], *, name: str) -> None:
    """Write a file, or the content of a folder, as a tar archive that root owns; devices and the like are left out.

    Args:
        source: the file or the folder.
        archive: an open file.
        name: the file's name in the archive; names in a folder stay as they are.

    Raises:
        OSError: if a file cannot be read.
    """
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        if not source.is_dir():
            tar.add(source, arcname=name, filter=_owned_by_root)
            return
        for path in sorted(source.iterdir()):
            tar.add(path, arcname=path.name, filter=_owned_by_root)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


class _BoundedReads:
    """An archive whose headers are short: `tarfile` reads a long name into memory, whatever its size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _MAX_READ:
            raise SandboxError("the archive from the sandbox has a header that is too long")
        return self._file.read(size)


def holds_folder(archive: IO[bytes]) -> bool:
    """Return whether an archive, read from its start, holds a folder: it then begins with the folder itself."""
    begin = archive.read(2)
    archive.seek(0)
    return begin in (b"./", b".\0")


def max_archive_bytes(max_bytes: int) -> int:
    """Return the size of an archive above which its files exceed a limit: each takes up to 1,023 bytes more."""
    return 2 * max_bytes + (1 << 20)


def unpack(archive: IO[bytes], target: Path, *, into_folder: bool, max_bytes: int) -> None:
    """Write the content of an untrusted archive: files, folders, and links that stay inside; nothing else.

    Args:
        archive: a tar archive, not compressed, from its beginning.
        target: the folder if `into_folder`, else the path of the archive's only file.
        into_folder: True if a folder was packed.
        max_bytes: limit of the sizes of all files together, holes in them included.

    Raises:
        SandboxError: if it exceeds the limit or is not an archive, or its names contradict each other.
    """
    try:
        with tarfile.open(fileobj=_BoundedReads(archive), mode="r:") as tar:  # type: ignore[call-overload]
            if into_folder:
                _unpack_folder(tar, target, max_bytes)
            else:
                _unpack_file(tar, target, max_bytes)
    except (tarfile.TarError, OSError, ValueError, OverflowError, UnicodeError) as error:
        raise SandboxError(f"the files from the sandbox cannot be written to {target}: {error}") from error


def _unpack_file(tar: tarfile.TarFile, target: Path, max_bytes: int) -> None:
    member = tar.next()
    if member is None or not member.isreg():
        raise SandboxError(f"{target.name} is not a file in the sandbox")
    _check_size(member.size, max_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(tar, member, target)


def _unpack_folder(tar: tarfile.TarFile, target: Path, max_bytes: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    written: dict[PurePosixPath, Path] = {}
    links: list[tuple[Path, str]] = []
    total = 0
    for member in tar:
        name = _inside(member.name)
        if name is None:
            continue
        path = target / name
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.issym():
            if _stays_inside(name, member.linkname):
                links.append((path, member.linkname))
        elif member.isreg() or member.islnk():
            original = written.get(_inside(member.linkname) or name) if member.islnk() else None
            total += original.stat().st_size if original else member.size
            _check_size(total, max_bytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            if original:
                shutil.copy(original, path)
            elif member.isreg():
                _write(tar, member, path)
            written[name] = path
    # Links come last: while files are written, no folder in their paths is a link.
    for path, to in links:
        _link(path, to, target)


def _link(path: Path, to: str, target: Path) -> None:
    """Make a link in `target`. Another link in its path would move it, and `to` was only checked by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.resolve() != target.resolve() / path.parent.relative_to(target):
        raise SandboxError(f"{path.name} is below a link in the archive")
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def _inside(name: str) -> PurePosixPath | None:
    """Return a name relative to the archive's folder; `None` if it leads out of it."""
    path = PurePosixPath(name)
    if len(path.parts) > _MAX_DEPTH:
        raise SandboxError(f"the sandbox has folders nested more than {_MAX_DEPTH} deep")
    return None if path.is_absolute() or ".." in path.parts else path


def _stays_inside(name: PurePosixPath, to: str) -> bool:
    """Return whether a link stays in the folder, whatever the other links are: `..` only at its beginning."""
    parts = PurePosixPath(to).parts
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return bool(parts) and parts[0] != "/" and ".." not in parts[ups:] and ups <= len(name.parts) - 1


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    content = tar.extractfile(member)
    assert content is not None  # a regular file
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise SandboxError(f"the files in the sandbox have more than max_bytes={max_bytes:,} bytes")
