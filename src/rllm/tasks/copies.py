"""Copies of task folders on the nodes of a cluster: sent with the rollouts, unpacked in a folder of the node's process.

Rows of tasks name folders of the machine that read them, and `here` returns the folder of a name on this machine.
"""

from __future__ import annotations

import io
import socket
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from rllm.errors import ConfigError
from rllm.sandbox.files import pack, unpack
from rllm.sandbox.owner import own_folder

MAX_SENT_MB = 100
"""Mebibytes of all task folders of a run; larger ones are not sent, and are read from a disk that the nodes share."""

_named: dict[str, None] = {}
"""Folders that rows of this process name: those of training and of evaluations."""
_copies: dict[str, Path] = {}
"""Copies in this process, by the folder on the machine that sent them."""


def name_folders(folders: Iterable[Path]) -> None:
    """Let `packed_folders` send folders, which rows of this process name."""
    _named.update(dict.fromkeys(map(str, folders)))


def packed_folders() -> Mapping[str, bytes | None]:
    """Return all folders that rows name, each with its compressed files; `None` where they are not sent."""
    folders = [folder for folder in map(Path, _named) if folder.is_dir()]
    num_bytes = sum(path.lstat().st_size for folder in folders for path in folder.rglob("*"))
    return {str(folder): None if num_bytes > MAX_SENT_MB << 20 else _packed(folder) for folder in folders}


def _packed(folder: Path) -> bytes:
    archive = io.BytesIO()
    pack(folder, archive, name="")
    return zlib.compress(archive.getvalue(), 1)


def unpack_folders(packed: Mapping[str, bytes | None]) -> None:
    """Write the folders of another machine for `here`.

    Raises:
        ConfigError: if one was not sent, and does not exist here.
    """
    for folder, files in packed.items():
        if files is not None and folder not in _copies:
            copy = Path(tempfile.mkdtemp(prefix="task-", dir=own_folder())) / Path(folder).name
            archive = io.BytesIO(zlib.decompress(files))
            unpack(archive, copy, into_folder=True, max_bytes=MAX_SENT_MB << 20)
            _copies[folder] = copy
        here(folder)


def here(folder: str) -> Path:
    """Return the folder of this machine that a row names, which may be a copy.

    Raises:
        ConfigError: if there is none.
    """
    found = _copies.get(folder, Path(folder))
    if not found.is_dir():
        raise ConfigError(
            f"the task folder {folder} is not on {socket.gethostname()}: tasks of more than {MAX_SENT_MB} MiB together "
            "are not sent to the nodes of a cluster; put them on a disk that all nodes have under the same path"
        )
    return found
