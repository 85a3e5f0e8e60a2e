"""Git repositories of tasks: fetched without history, and kept by commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from rllm._runtime.files import cache_folder, whole_folder
from rllm.errors import ConfigError, last_lines

_URL = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 600


def is_repository(source: str) -> bool:
    """Return whether a source of tasks is the URL of a repository: https, http, ssh, git, file or `user@host:path`."""
    return bool(_URL.fullmatch(source))


def fetched(source: str) -> Path:
    """Return a folder with the files of a repository, in the cache folder.

    A commit that is there is not fetched again; for a branch or a tag, the server is asked which commit that is.

    Args:
        source: `URL#REF:SUBFOLDER`, as Docker has it. REF is a branch, a tag or a whole commit, by default the default
            branch.

    Raises:
        ConfigError: if git is not installed, or the repository, the ref or the subfolder does not exist.
    """
    url, _, fragment = source.partition("#")
    ref, _, subfolder = fragment.partition(":")
    if shutil.which("git") is None:
        raise ConfigError(f"tasks={source!r}: git is not installed: install it, or name a folder")
    if ref.startswith("-"):
        raise ConfigError(f"tasks={source!r}: {ref!r} is not a branch, tag or commit")
    place = cache_folder() / "tasks" / sha256(url.encode()).hexdigest()[:16]
    commit = ref if _COMMIT.fullmatch(ref) else _commit_of(source, url, ref or "HEAD")
    files = place / commit
    if not files.is_dir():
        _fetch(source, url, commit if _COMMIT.fullmatch(ref) else ref or "HEAD", files)
    folder = (files / subfolder).resolve()
    if not folder.is_dir() or not folder.is_relative_to(files.resolve()):
        raise ConfigError(f"tasks={source!r}: the repository has no folder {subfolder!r}")
    return folder


def _commit_of(source: str, url: str, ref: str) -> str:
    """Return the commit that a branch or a tag is on the server."""
    lines = (line.partition("\t") for line in _git(source, "ls-remote", "--", url).split("\n"))
    listed = {name: commit for commit, _, name in lines}
    for name in (ref, f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"):
        if name in listed:
            return listed[name]
    known = [name.rpartition("/")[2] for name in listed if name.startswith(("refs/heads/", "refs/tags/"))]
    raise ConfigError(
        f"tasks={source!r}: the repository has no branch or tag {ref!r}, but {', '.join(known[:20]) or 'none at all'}"
    )


def _fetch(source: str, url: str, ref: str, files: Path) -> None:
    """Write the files of a ref; another process may do the same meanwhile."""
    with whole_folder(files) as new:
        _git(source, "init", "--quiet", str(new))
        _git(source, "-C", str(new), "fetch", "--quiet", "--depth=1", "--", url, ref)
        _git(source, "-C", str(new), "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD")
        shutil.rmtree(new / ".git")


def _git(source: str, *arguments: str) -> str:
    """Run git without questions, and return its output."""
    try:
        done = subprocess.run(
            ["git", "-c", "protocol.ext.allow=never", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"tasks={source!r}: git did not end within {_TIMEOUT_S} seconds") from error
    if done.returncode:
        raise ConfigError(
            f"tasks={source!r} cannot be fetched: {last_lines(done.stderr)}; check the URL, the ref "
            "and your access, or name a folder"
        )
    return done.stdout
