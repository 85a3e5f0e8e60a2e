"""`rllm init`: a project to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

TEMPLATE = Path(__file__).with_name("new_project")
RENAMED = {"gitignore": ".gitignore"}
"""Files that would mean something to this project under their own name."""


def init(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the project; made if it is not there.", metavar="DIR")
    ] = Path(),
    force: Annotated[
        bool,
        typer.Option("--force", help="Write also where there are files already; those of the same names are replaced."),
    ] = False,
) -> None:
    """Make a project: an agent and its reward, tasks, tests that need no model, and settings."""
    from rllm.cli.terminal import command
    from rllm.errors import ConfigError

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"{str(folder)!r} is not empty: name another folder, or give --force")
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = folder / source.relative_to(TEMPLATE).with_name(RENAMED.get(source.name, source.name))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"{str(target)!r} cannot be written ({error.strerror or error}): name another folder"
                ) from error
            print(target)
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nNext: {where}python -m pytest (pip install pytest), then {command()} doctor; README.md says the rest.")
