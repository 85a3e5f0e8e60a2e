"""Images of the backend `local`: programs of this machine or of a folder, and files that are written at the start.

No image is built from a Dockerfile: its steps are run in a new sandbox. `FROM` stands for this machine's programs;
`WORKDIR`, `ENV`, `COPY`, `ADD` of files and `RUN` are done, and other instructions that change an image are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rllm.errors import last_lines
from rllm.sandbox.base import Command, Sandbox, SandboxError
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
"""Content of `/etc` in a sandbox: nothing that is private to this machine, such as the keys in `ssl/private`."""
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
    logger.warning(
        "sandbox=local: the programs of this machine are used instead of the image %s; sandbox=podman uses the image",
        base,
    )


def host_files() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return the bound files (source and target), the links, and the new folders of the image `host`."""
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
    """Return the bound files, the links, and the new folders of an image; its empty folders can be written to."""
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


NAME = "Dockerfile"
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL")
"""Instructions that change nothing for commands that are run in a sandbox."""


@dataclass(frozen=True)
class Copy:
    """Copy a file, or the content of a folder, to a path in the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a command, which must succeed."""

    command: Command
    cwd: str
    env: Mapping[str, str]
    line: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Content of a Dockerfile."""

    path: Path
    base: str = ""
    """Image that `FROM` names."""
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Copy | Run, ...] = ()


def read_dockerfile(folder: Path) -> Recipe:
    """Return the steps of the Dockerfile in a folder.

    Raises:
        SandboxError: if a line is not supported; the message names it and the remedy.
    """
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxError(f"{path} cannot be read: {error}") from error
    recipe = Recipe(path=path)
    for line, instruction, rest in _instructions(text):
        try:
            recipe = _with_instruction(recipe, line, instruction, rest)
        except FileNotFoundError as error:
            raise SandboxError(f"{path}, line {line}: {error}") from None
        except ValueError as error:
            remedy = "sandbox=local builds no image: use sandbox=podman"
            raise SandboxError(f"{path}, line {line}: {error}; {remedy}") from None
    if not recipe.base:
        raise SandboxError(f"{path} has no FROM")
    return recipe


def _with_instruction(recipe: Recipe, line: int, instruction: str, rest: str) -> Recipe:
    """Return the recipe after one more instruction; raise ValueError if it is not supported."""
    folder = recipe.workdir or "/"
    match instruction:
        case _ if instruction in _WITHOUT_EFFECT or (instruction == "USER" and rest in ("root", "0", "0:0")):
            return recipe
        case _ if not rest:
            raise ValueError(f"{instruction} without arguments")
        case "FROM" if not recipe.base:
            return replace(recipe, base=next((word for word in shlex.split(rest) if not word.startswith("--")), ""))
        case "WORKDIR":
            folder = str(PurePosixPath(folder, _plain(rest)))
            made = Run(command=_make(folder), cwd="/", env=recipe.env, line=line)
            return replace(recipe, workdir=folder, steps=(*recipe.steps, made))
        case "ENV":
            return replace(recipe, env={**recipe.env, **_variables(rest)})
        case "COPY" | "ADD":
            return replace(recipe, steps=(*recipe.steps, *_copies(recipe.path.parent, rest, folder)))
        case "RUN":
            run = Run(command=_command(rest), cwd=folder, env=recipe.env, line=line)
            return replace(recipe, steps=(*recipe.steps, run))
    raise ValueError(f"{'a second ' if instruction == 'FROM' else ''}{instruction} {rest} is not supported")


def _plain(text: str) -> str:
    if "$" in text:
        raise ValueError(f"a variable in {text!r} is not supported")
    return text.strip()


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    pairs = [word.partition("=") for word in words]
    if not all(separator for _, separator, _ in pairs):  # the old form: ENV NAME the value
        pairs = [(words[0], "=", rest.partition(words[0])[2].strip())]
    return {name: _plain(value) for name, _, value in pairs}


def _copies(folder: Path, rest: str, workdir: str) -> Iterator[Copy]:
    """Yield the copies that COPY or ADD makes; raise FileNotFoundError if the folder lacks a source."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or any(word.startswith("--") or "://" in word or "<<" in word for word in words):
        raise ValueError(f"COPY {rest!r} is not supported")
    *patterns, target = map(_plain, words)
    into_folder = len(patterns) > 1 or target.endswith(("/", "/.")) or target == "."
    place = PurePosixPath(workdir, target)
    for pattern in patterns:
        inside = pattern.lstrip("/") or "."
        found = [folder] if inside in (".", "./") else sorted(folder.glob(inside))
        if not found or any(not path.resolve().is_relative_to(folder.resolve()) for path in found):
            raise FileNotFoundError(f"the folder has no {pattern!r} to copy")
        for source in found:
            yield Copy(source, str(place / source.name if into_folder and source.is_file() else place))


def _command(rest: str) -> Command:
    if rest.startswith("--") or "<<" in rest:
        raise ValueError("RUN with options or a here-document is not supported")
    try:
        return [str(word) for word in json.loads(rest)] if rest.startswith("[") else rest
    except ValueError:
        return rest


async def build(recipe: Recipe, sandbox: Sandbox, *, timeout_s: float = 600.0) -> None:
    """Run the steps in a new sandbox, each command within `timeout_s`.

    Raises:
        SandboxError: if a file cannot be copied or a command fails, with the end of its output.
    """
    for step in recipe.steps:
        if isinstance(step, Copy):
            await sandbox.upload(step.source, step.target)
            continue
        if step.command == _make(sandbox.workdir):  # it is there from the start
            continue
        ended = await sandbox.exec(step.command, cwd=step.cwd, env=step.env, timeout_s=timeout_s)
        if not ended.ok:
            failure = f"{ended.failure(timeout_s)}: {last_lines(ended.output)}"
            raise SandboxError(f"{recipe.path}, line {step.line}: {failure}")


def _make(folder: str) -> Command:
    return ["mkdir", "-p", folder]


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each instruction's first line, its name and its arguments."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        continues = re.search(r"\\\s*$", line)
        parts.append(line[: continues.start()] if continues else line)
        if not continues:
            name, _, rest = " ".join(parts).strip().partition(" ")
            yield first, name.upper(), rest.strip()
            parts = []
