"""The arguments and options that several commands have, each with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer


def above_zero(seconds: float | None) -> float | None:
    """What the user gave for an option in seconds, checked: the callback of such options."""
    if seconds is not None and not seconds > 0:
        raise typer.BadParameter(f"{seconds:g}: use a number of seconds above 0")
    return seconds


def known_split(name: str | None) -> str | None:
    """The split of a run's episodes that the user named, checked; tasks that were given with --val are not named by that."""
    if name not in (None, "train", "eval"):
        raise typer.BadParameter(f"{name!r}: use train, or eval, which has the episodes of held-out tasks (--val)")
    return name


Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, such as optim.lr=1e-5; `rllm config` lists them. They replace those of the environment (RLLM__OPTIM__LR=1e-5), which replace "
        "those of --config.",
        metavar="KEY=VALUE",
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Judges what the agent returns; it is called with the task and that. Without it the agent returns its reward.",
        metavar="FILE.py:function",
        show_default=False,
    ),
]
Split: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Which part of the data to take, where it has several: train, test, ...", show_default=False),
]
ValSplit: TypeAlias = Annotated[
    str | None, typer.Option(help="Which part of --val to take, likewise.", show_default=False)
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
OnlyJson: TypeAlias = Annotated[bool, typer.Option("--json", help="JSON on stdout, in the place of text.")]

Checkpoint: TypeAlias = Annotated[
    str, typer.Option(help="Of a run: latest, best, or one by name, such as step-000020.")
]
CheckpointOfRun: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="If the model is the folder of a run: latest (the default), best, or one by name, such as step-000020.",
        show_default=False,
    ),
]

Server: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        "--upstream",
        help="OpenAI-compatible server that has the model; its key comes from RLLM_UPSTREAM_API_KEY or OPENAI_API_KEY.",
        metavar="URL",
        show_default=False,
    ),
]
ModelOrName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Model folder, hub id, or the folder of a run; of a model that a server has, its name there.",
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
        help="Folder or hub id of the served model: later turns then go on from the very tokens that were sampled.",
        show_default=False,
    ),
]

ChatTemplateFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="Jinja file that the server was started with in place of the model's template; needs --tokenizer.",
        show_default=False,
    ),
]

DEFAULT_STORE = "sqlite:///traces.db"
Store: TypeAlias = Annotated[
    str, typer.Option("--store", help="Where traces are kept: a file or a URL.", metavar="STORE")
]
KeepDays: TypeAlias = Annotated[
    float | None, typer.Option(help="Delete sessions whose last call is more days ago.", show_default=False)
]
MaxGb: TypeAlias = Annotated[
    float | None, typer.Option(help="Delete the oldest sessions above this size.", show_default=False)
]
Host: TypeAlias = Annotated[str, typer.Option(help="Address to listen on; any but a loopback one needs a key.")]
Port: TypeAlias = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
GatewayKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Key of the gateway, which its clients present.", envvar="RLLM_GATEWAY_API_KEY", show_default=False
    ),
]
