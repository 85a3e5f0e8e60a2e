"""The arguments and options that the commands which train have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, such as optim.lr=1e-5. They replace those of the environment (RLLM__OPTIM__LR=1e-5), which replace "
        "those of --config.",
        metavar="KEY=VALUE",
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Judges what the agent returns: called with the task and that. Else the agent returns its reward.",
        metavar="FILE.py:function",
        show_default=False,
    ),
]
Split: TypeAlias = Annotated[
    str | None, typer.Option(help="Part of the data that is taken, where it has several.", show_default=False)
]
ValSplit: TypeAlias = Annotated[
    str | None, typer.Option(help="Part of --val that is taken, where it has several.", show_default=False)
]
Model: TypeAlias = Annotated[
    str | None, typer.Option(help="Model folder or hub id; the same as model.path=...", show_default=False)
]
Backend: TypeAlias = Annotated[
    str | None, typer.Option(help="What holds the weights: local or verl; the same as backend=...", show_default=False)
]
RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Ray cluster, host:port or auto; the same as ray.address=...", show_default=False),
]
Config: TypeAlias = Annotated[Path | None, typer.Option(help="YAML file of settings.", show_default=False)]
Resume: TypeAlias = Annotated[
    Path | None, typer.Option(help="Run folder to go on from, with its settings.", show_default=False)
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print every setting and where it comes from, and stop.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")]
