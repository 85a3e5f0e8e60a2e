"""`rllm doctor`: what works here and what does not, each with what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.inference.capabilities import Capabilities, Finding


def doctor(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server, up to and including /v1: say what it can do for training.",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to ask for; else the first that is served.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> None:
    """Find out what a server can do: token ids, log-probabilities and their kind, token-id prompts, tools, new weights.

    The exit code is 1 if it cannot be trained with.
    """
    from rich.console import Console

    from rllm.cli.training import print_json
    from rllm.inference.capabilities import probe

    if endpoint is None:
        raise ConfigError("nothing to look at: name a server, as in --endpoint http://127.0.0.1:8000/v1")
    found = probe(endpoint, model=model, api_key=api_key)
    _report(Console(stderr=as_json, highlight=False), found)
    if as_json:
        print_json(found.to_dict())
    if not found.can_train:
        raise typer.Exit(1)


def _report(console: Console, found: Capabilities) -> None:
    console.print(f"{found.url} ({found.model or 'no model'})", soft_wrap=True, markup=False)
    for finding in found.findings:
        console.print(f"  {_mark(finding):5} {finding.name:26} {finding.said}", soft_wrap=True, markup=False)
        if finding.fix:
            console.print(f"        fix: {finding.fix}", soft_wrap=True, markup=False)
    if found.can_train:
        console.print("It can be trained with: model.engine=vllm vllm.url=" + found.url, soft_wrap=True, markup=False)
        return
    console.print("It cannot be trained with. A vLLM that can:", soft_wrap=True)
    console.print(f"  {_right_command()}", soft_wrap=True, markup=False)


def _mark(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "lacks" if finding.needed else "note"


def _right_command() -> str:
    """How a server that does all this is started by hand."""
    import shlex

    from rllm.inference.vllm.command import ServeOptions, serve_arguments, serve_environment

    options = ServeOptions(model="MODEL", port=8000, served_name="policy")
    variables = [f"{name}={shlex.quote(value)}" for name, value in serve_environment(options, {}).items()]
    return " ".join([*variables, "vllm", *map(shlex.quote, serve_arguments(options))])
