"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer


def above_zero(seconds: float | None) -> float | None:
    """Check the value of an option in seconds; the callback of such options."""
    if seconds is not None and not seconds > 0:
        raise typer.BadParameter(f"{seconds:g}: use a number of seconds above 0")
    return seconds


def known_split(name: str | None) -> str | None:
    """Check the name of a split of a run's episodes."""
    if name not in (None, "train", "eval"):
        raise typer.BadParameter(f"{name!r}: use train, or eval, which has the episodes of held-out tasks (--val)")
    return name


Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, such as optim.lr=1e-5; `rllm config` lists them. They override the environment "
        "(RLLM__OPTIM__LR=1e-5), which overrides --config.",
        metavar="KEY=VALUE",
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Reward function, called with the task and the agent's result. Without it the agent returns its reward.",
        metavar="FILE.py:function",
        show_default=False,
    ),
]
Split: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Split of the data to use, if it has several: train, test, ...", show_default=False),
]
ValSplit: TypeAlias = Annotated[
    str | None, typer.Option(help="Split of --val to use, if it has several.", show_default=False)
]
Model: TypeAlias = Annotated[
    str | None, typer.Option(help="Model folder or hub id; the same as model.path=...", show_default=False)
]
Backend: TypeAlias = Annotated[
    str | None, typer.Option(help="Backend that trains: local or verl; the same as backend=...", show_default=False)
]
RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Ray cluster, host:port or auto; the same as ray.address=...", show_default=False),
]
Config: TypeAlias = Annotated[Path | None, typer.Option(help="YAML file of settings.", show_default=False)]
Resume: TypeAlias = Annotated[
    Path | None, typer.Option(help="Run folder to resume, with its settings.", show_default=False)
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print every setting and its origin, and exit.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout at the end.")]
OnlyJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]

Checkpoint: TypeAlias = Annotated[
    str, typer.Option(help="Checkpoint of the run: latest, best, or a name such as step-000020.")
]
CheckpointOfRun: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Checkpoint, if the model is a run folder: latest (the default), best, or a name such as step-000020.",
        show_default=False,
    ),
]

Server: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        "--upstream",
        help="OpenAI-compatible server with the model; its key is RLLM_UPSTREAM_API_KEY or OPENAI_API_KEY.",
        metavar="URL",
        show_default=False,
    ),
]
ModelOrName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Model folder, hub id, or the folder of a run; with --base-url the model's name on the server.",
        show_default=False,
    ),
]
ServerKind: TypeAlias = Annotated[
    Literal["vllm", "openai"],
    typer.Option(help="vllm: the server takes extra fields (also SGLang, rllm). openai: it rejects unknown fields."),
]
Tokenizer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the served model: later turns then continue from exactly the sampled tokens.",
        show_default=False,
    ),
]

ChatTemplateFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="Jinja file that the server uses instead of the model's template; needs --tokenizer.",
        show_default=False,
    ),
]

DEFAULT_STORE = "sqlite:///traces.db"
Store: TypeAlias = Annotated[str, typer.Option("--store", help="Store of traces: a file or a URL.", metavar="STORE")]
KeepDays: TypeAlias = Annotated[
    float | None, typer.Option(help="Delete sessions whose last call is older than this many days.", show_default=False)
]
MaxGb: TypeAlias = Annotated[
    float | None, typer.Option(help="Delete the oldest sessions above this size.", show_default=False)
]
Host: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Address to listen on; a key is required unless it is a loopback address.",
    ),
]
Port: TypeAlias = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
GatewayKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Key that clients of the gateway must present.", envvar="RLLM_GATEWAY_API_KEY", show_default=False
    ),
]
