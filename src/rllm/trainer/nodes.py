"""What a machine says of its GPUs and folders: asked here, and on every node of a cluster."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


def gpus_of_driver() -> list[str]:
    """Name and memory of each GPU, as far as the driver's own program tells."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.split("\n") if line.strip()]


def nearest_folder(folder: str | None) -> Path:
    """The folder, or the one around it that is there; of temporary files if none is named."""
    path = Path(folder or tempfile.gettempdir())
    return next(parent for parent in (path, *path.parents) if parent.exists())


def why_unwritable(folder: Path) -> str | None:
    """What the system says to one who writes a file there; `None` if nothing is against it. The file is gone at once."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
