"""Where registered datasets lie, and how a file there is replaced whole."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllm._runtime.files import lock, sync
from rllm.errors import ConfigError

SUFFIX = ".jsonl"

_NAME = re.compile(r"\w[\w.+-]*")
_LONGEST_NAME = 100


def datasets_folder() -> Path:
    """`$RLLM_HOME/datasets`, or `~/.rllm/datasets`."""
    return Path(os.environ.get("RLLM_HOME") or "~/.rllm").expanduser() / "datasets"


def folder_of(name: str) -> Path:
    """The folder of a dataset, which has a file for each split.

    Raises:
        ConfigError: if the name could not be that of a folder, or would lead elsewhere.
    """
    return datasets_folder() / _checked(name, "dataset")


def file_of(name: str, split: str) -> Path:
    """The file of a split.

    Raises:
        ConfigError: as `folder_of` does.
    """
    return folder_of(name) / (_checked(split, "split") + SUFFIX)


def _checked(name: str, kind: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"{kind}={name!r} cannot be the name of a file: use letters, digits and any of '_.+-' behind the first, "
            f"at most {_LONGEST_NAME} bytes"
        )
    return name


@contextmanager
def writing() -> Iterator[None]:
    """Hold the folder of datasets, waiting for whoever holds it; readers never wait.

    Raises:
        ConfigError: if it cannot be written.
    """
    folder = datasets_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"datasets cannot be kept in {str(folder)!r}: {error.strerror}; set RLLM_HOME to a folder that can be written"
        ) from error
    with held:
        lock(held, wait=True)
        yield


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file then takes the place of `path`, on disk and whole; after an error, nothing has."""
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        with draft.open("rb+") as file:
            sync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
