"""Images of the backend `local`: programs of this machine or of a folder, and files that are written at the start."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rllm.sandbox.base import SandboxError
from rllm.sandbox.owner import own_folder

logger = logging.getLogger(__name__)

HOST = "host"
"""Image: the programs of this machine."""
DESCRIPTION, ARCHIVE = "rllm-image.json", "files.tar"
_HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_SETTINGS = (
    *("alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types"),
    *("nsswitch.conf", "os-release", "pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs", "protocols", "services"),
    *("ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf"),
)
"""Of `/etc`: nothing that is private to this machine, such as the keys in `ssl/private`."""
_OF_ENVIRONMENT = ("bin", "etc", "include", "lib", "lib64", "pyvenv.cfg", "share")
HOST_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}
_OWN = frozenset({"dev", "proc", "sys", "tmp", "run", "root", "home"})
"""Folders in `/` that no image gives a sandbox."""


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """An image: a base, and files that are written at the start."""

    name: str
    base: str
    """`host`, or the path of a root file system."""
    archive: Path | None = None
    """Folder with the files that are written at the start."""
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> LocalImage:
        """Return an image by name."""
        folder = Path(name)
        if name == HOST:
            return cls(name=name, base=HOST)
        if (folder / DESCRIPTION).is_file():
            return cls(name=name, archive=folder, **json.loads((folder / DESCRIPTION).read_text()))
        if not folder.is_absolute() or not (folder / "bin/sh").exists():
            raise SandboxError(
                f"image {name!r}: sandbox=local has `host`, and folders with a root file system by their absolute "
                "paths; other images are for sandbox=podman"
            )
        return cls(name=name, base=name)


def snapshots() -> Path:
    """Return the folder of this process's snapshots."""
    return own_folder() / "snapshots"


def new_archive(folder: Path, description: Mapping[str, Any]) -> IO[bytes]:
    """Make the folder of an image, and open the archive of its files."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / DESCRIPTION).write_text(json.dumps(description))
    return (folder / ARCHIVE).open("wb")


def digest(folder: Path) -> str:
    """Return a digest of the names, modes and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            total.update(f"link {name!r} {str(path.readlink())!r}\n".encode())
        elif path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"file {name!r} {bool(path.stat().st_mode & 0o100)} {content}\n".encode())
    return total.hexdigest()[:32]


@functools.cache
def warn_of_base(base: str) -> None:
    """Log once that the image's name in `FROM` has no effect."""
    logger.warning("sandbox=local: the programs of this machine stand for the image %s; sandbox=podman uses it", base)


def host_files() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return what is bound (source and target), the links, and the new folders of the image `host`."""
    root = Path("/")
    there = [path for name in _HOST_FOLDERS if (path := root / name).exists()]
    links = [(str(path.readlink()), str(path)) for path in there if path.is_symlink()]
    settings = [path for name in _HOST_SETTINGS if (path := root / "etc" / name).exists()]
    prefixes = {Path(sys.base_prefix)}  # of the interpreter and its packages
    if sys.prefix != sys.base_prefix:  # a virtual environment, which may be in the folder of a project
        prefixes |= {path for name in _OF_ENVIRONMENT if (path := Path(sys.prefix) / name).exists()}
    bound = [path for path in there if not path.is_symlink()] + settings
    bound += sorted(path for path in prefixes if not any(path.is_relative_to(folder) for folder in there))
    return [(str(path), str(path)) for path in bound], links, ["/etc", "/var", "/var/tmp", "/opt", "/home"]


def root_file_system(image: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return what is bound, the links, and the new folders of an image; its empty folders can be written to."""
    binds, links, folders = [], [], []
    for path in sorted(image.iterdir()):
        target = f"/{path.name}"
        if path.name in _OWN:
            continue
        if path.is_symlink():
            links.append((str(path.readlink()), target))
        elif path.is_dir() and not any(path.iterdir()):
            folders.append(target)
        else:
            binds.append((str(path), target))
    return binds, links, folders
