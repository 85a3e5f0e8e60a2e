"""Task folders in Harbor's format, read from a folder or a git repository."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path

from rllm._runtime.files import cache_folder, whole_folder
from rllm.errors import ConfigError, counted, last_lines
from rllm.sandbox.base import ImageSource, SandboxLimits
from rllm.tasks.task import TaskFolder
from rllm.tasks.task_toml import EnvironmentTable, TaskToml, read_toml, without_effect
from rllm.tracking.about import leading_out

logger = logging.getLogger(__name__)

TOML = "task.toml"
_PARTS = ("instruction.md", "environment", "solution", "tests")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def read_tasks(source: str | Path) -> list[TaskFolder]:
    """Return the task of a folder, or all tasks in the folders below it, by name.

    Args:
        source: a folder, or the URL of a git repository, `URL#REF:SUBFOLDER`; see `fetched`.

    Raises:
        ConfigError: if a file or a field is wrong; the message names each of them, with the remedy.
    """
    folder = fetched(str(source)) if is_repository(str(source)) else Path(source).expanduser()
    tasks: list[TaskFolder] = []
    problems: list[str] = []
    if not folder.is_dir():
        raise ConfigError(f"tasks={str(folder)!r}: no such folder; name a task folder, or a folder of them")
    if not (folders := _task_folders(folder)):
        raise ConfigError(
            f"tasks={str(folder)!r}: neither it nor a folder in it has a {TOML}; docs/tasks.md has the format"
        )
    for found in folders:
        try:
            tasks.append(read_task(found))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    [(name, count)] = Counter(task.name for task in tasks).most_common(1)
    if count > 1:
        twice = ", ".join(str(task.folder) for task in tasks if task.name == name)
        raise ConfigError(f"{counted(count, 'task')} have the name {name!r}: {twice}; change task.name of all but one")
    return sorted(tasks, key=lambda task: task.name)


def has_tasks(folder: Path) -> bool:
    """Return whether a folder is a task, or has tasks below it, each with a `task.toml`."""
    return any((found / TOML).is_file() for found in _task_folders(folder))


def _task_folders(folder: Path) -> list[Path]:
    """Return the folders of a source that are tasks, complete or not; empty if there are none."""
    if any((folder / name).exists() for name in (TOML, *_PARTS)):
        return [folder]
    for pattern in ("*", "*/*"):  # Harbor's downloads are two folders deep
        below = [path for path in sorted(folder.glob(pattern)) if path.is_dir() and not path.name.startswith(".")]
        if found := [path for path in below if any((path / name).exists() for name in (TOML, "instruction.md"))]:
            return found
    return []


def read_task(folder: str | Path) -> TaskFolder:
    """Return the task of a folder; raise `ConfigError` as `read_tasks` does."""
    folder = Path(folder).expanduser().absolute()
    required = {
        TOML: "its settings; an empty file has the defaults",
        "instruction.md": "what the agent is asked to do",
        "tests/test.sh": "the verifier, which writes a number to /logs/verifier/reward.txt",
    }
    parts = {folder / name: about for name, about in required.items()}
    missing = [f"{path} is missing: {about}" for path, about in parts.items() if not path.is_file()]
    if missing:
        raise ConfigError("\n".join(missing))
    if (folder / "tests/test.sh").read_bytes().partition(b"\n")[0].endswith(b"\r"):
        raise ConfigError(f"{folder / 'tests/test.sh'} has Windows line endings, which sh cannot run: use \\n alone")
    for path, what in leading_out(folder):  # a sandbox would get files of this machine
        raise ConfigError(f"{path} is {what}: remove it, or replace a link by a copy")
    read = read_toml(folder / TOML)
    environment = read.environment
    for note in without_effect(read):
        _warn_once(f"{folder / TOML}: {note}; it has no effect")
    return TaskFolder(
        name=read.task.name if read.task else folder.name,
        folder=folder,
        instruction=_instruction(folder / "instruction.md"),
        image=_image(folder, read),
        verifier_image=_verifier_image(folder, read),
        limits=_limits(environment),
        workdir=environment.workdir,
        env=environment.env,
        verifier_env=read.verifier.env,
        solution_env=read.solution.env,
        agent_timeout_s=read.agent.timeout_sec,
        verifier_timeout_s=read.verifier.timeout_sec,
        build_timeout_s=environment.build_timeout_sec,
        artifacts=_artifacts(read),
        metadata=read.metadata,
    )


def _instruction(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if _is_canary(lines[0]):
        while lines and (not lines[0].strip() or _is_canary(lines[0])):
            lines.pop(0)
    text = "\n".join(lines)
    if not text.strip():
        raise ConfigError(f"{path} is empty: write what the agent is asked to do")
    return text


def _is_canary(line: str) -> bool:
    """Return whether a line marks a file of a benchmark; agents do not see it."""
    text = line.strip().lower()
    return "canary" in text and (text.startswith("#") or (text.startswith("<!--") and text.endswith("-->")))


def _image(folder: Path, task: TaskToml) -> ImageSource:
    build = folder / "environment"
    if task.environment.docker_image:
        return ImageSource(name=task.environment.docker_image)
    if found := [name for name in _COMPOSE if (build / name).is_file()]:
        raise ConfigError(f"{build / found[0]}: tasks of several containers are not supported: use one Dockerfile")
    if not (build / "Dockerfile").is_file():
        raise ConfigError(
            f"{build / 'Dockerfile'} is missing: write it, or name an image as environment.docker_image in {TOML}"
        )
    return ImageSource(folder=build)


def _verifier_image(folder: Path, task: TaskToml) -> ImageSource | None:
    """Return the verifier's own image: `tests/` with a Dockerfile, which Harbor builds for separate verifiers only."""
    is_own = task.verifier.environment_mode == "separate" and (folder / "tests" / "Dockerfile").is_file()
    return ImageSource(folder=folder / "tests") if is_own else None


def _artifacts(task: TaskToml) -> tuple[str, ...]:
    named = tuple(path for path in task.artifact_paths if path.startswith("/"))
    return (*named, "/logs/artifacts") if task.verifier.environment_mode == "separate" else named


def _limits(environment: EnvironmentTable) -> SandboxLimits:
    default = SandboxLimits()
    return SandboxLimits(
        cpus=environment.cpus or default.cpus,
        memory_mb=environment.memory_mb or default.memory_mb,
        disk_mb=environment.storage_mb or default.disk_mb,
    )


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


_URL = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 600


def is_repository(source: str) -> bool:
    """Return whether a source of tasks is the URL of a repository: https, http, ssh, git, file or `user@host:path`."""
    return bool(_URL.fullmatch(source))


def fetched(source: str) -> Path:
    """Return a folder with the files of a repository, in the cache folder.

    A commit that is already there is not fetched again; for a branch or a tag, the server is asked for its commit.

    Args:
        source: `URL#REF:SUBFOLDER`, as for Docker. REF is a branch, a tag or a whole commit, by default the default
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
        wanted = commit if _COMMIT.fullmatch(ref) else ref or "HEAD"
        with whole_folder(files) as new:  # another process may do the same meanwhile
            _git(source, "init", "--quiet", str(new))
            _git(source, "-C", str(new), "fetch", "--quiet", "--depth=1", "--", url, wanted)
            _git(source, "-C", str(new), "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD")
            shutil.rmtree(new / ".git")
    folder = (files / subfolder).resolve()
    if not folder.is_dir() or not folder.is_relative_to(files.resolve()):
        raise ConfigError(f"tasks={source!r}: the repository has no folder {subfolder!r}")
    return folder


def _commit_of(source: str, url: str, ref: str) -> str:
    """Return the server's commit of a branch or a tag."""
    lines = (line.partition("\t") for line in _git(source, "ls-remote", "--", url).split("\n"))
    listed = {name: commit for commit, _, name in lines}
    for name in (ref, f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"):
        if name in listed:
            return listed[name]
    known = [name.rpartition("/")[2] for name in listed if name.startswith(("refs/heads/", "refs/tags/"))]
    raise ConfigError(
        f"tasks={source!r}: the repository has no branch or tag {ref!r}, but {', '.join(known[:20]) or 'none at all'}"
    )


def _git(source: str, *arguments: str) -> str:
    """Run git without prompts, and return its output."""
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
